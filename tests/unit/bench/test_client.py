"""The load client against a scripted server on a socket: framing, streams, failures."""

import asyncio
import contextlib
import itertools
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.api.chat.answer import REASONING_KEYS
from mlx_parallm.bench.client import LoadClient, SSEParser, StreamEvents
from mlx_parallm.bench.http_stream import Response, ResponseError, Target
from mlx_parallm.bench.load import closed_loop, open_loop
from mlx_parallm.bench.record import PlannedRequest, RequestRecord

EVENTS = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"index": 0, "delta": {"content": "one "}}]},
    {"choices": [{"index": 0, "delta": {"content": "two"}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}},
]
STREAM = b": hello\n\n" + b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in EVENTS)
DONE = b"data: [DONE]\n\n"


def make_planned(index=0, arrival_s=0.0):
    return PlannedRequest(
        index=index,
        route="/v1/completions",
        body={"prompt": "x"},
        max_tokens=2,
        arrival_s=arrival_s,
    )


def in_pieces(data, sizes):
    """Cut ``data`` into pieces of the sizes, the rest last."""
    for size in sizes:
        piece, data = data[:size], data[size:]
        yield piece
    yield data


def as_chunked(data, size):
    pieces = [data[begin : begin + size] for begin in range(0, len(data), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"


@contextlib.asynccontextmanager
async def serving(answer):
    """Serve: send the bytes ``answer`` to every request, and close."""
    seen = []

    async def handle(reader, writer):
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", seen


async def send_to(answer, **options):
    async with serving(answer) as (url, seen):
        client = LoadClient(Target.from_url(url), **options)
        return await client.send(make_planned()), seen


@pytest.mark.parametrize(
    "framed",
    [
        b"HTTP/1.0 200 OK\r\n\r\n" + STREAM + DONE,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + as_chunked(STREAM + DONE, 7),
        b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(STREAM + DONE) + STREAM + DONE,
    ],
    ids=["until close", "chunked", "content length"],
)
async def test_a_stream_is_read_whatever_its_framing(framed):
    ticks = itertools.count()
    record, seen = await send_to(framed, clock=lambda: float(next(ticks)), api_key="key")
    assert record.error is None
    assert record.text == "one two"
    assert (record.prompt_tokens, record.output_tokens) == (5, 2)
    assert record.finish_reason == "stop"
    assert record.start_s < record.chunk_times_s[0] <= record.chunk_times_s[1] < record.end_s
    assert b"Authorization: Bearer key" in seen[0]


async def test_the_first_non_empty_text_is_the_first_chunk():
    record, _ = await send_to(b"HTTP/1.0 200 OK\r\n\r\n" + STREAM + DONE)
    assert len(record.chunk_times_s) == 2


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.0 200 OK\r\n\r\n" + STREAM, "without \\[DONE\\]"),
        (b"HTTP/1.0 200 OK\r\n\r\n" + DONE, "no usage"),
        (b"HTTP/1.0 429 Busy\r\n\r\nslow down", "status 429: slow down"),
        (b"HTTP/1.0 200 OK\r\n\r\ndata: {\n\n", "JSONDecodeError"),
        (b'HTTP/1.0 200 OK\r\n\r\ndata: {"error": {"message": "bad"}}\n\n' + DONE, "bad"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", "connection ended"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nab", "connection ended"),
        (b"", "connection ended"),
        (b"SSH-2.0-server\r\n\r\n", "not an HTTP response"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", "chunk size"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 30_000, "too long"),
    ],
)
async def test_a_failure_is_in_the_record(answer, error):
    record, _ = await send_to(answer)
    assert record.error is not None
    assert re.search(error, record.error)


async def test_a_server_that_is_not_there_is_an_error_of_the_record():
    async with serving(b"") as (url, _):
        pass
    record = await LoadClient(Target.from_url(url)).send(make_planned())
    assert record.status is None
    assert record.error is not None


async def test_get_json_raises_for_other_statuses():
    async with serving(b"HTTP/1.0 503 No\r\n\r\n{}") as (url, _):
        with pytest.raises(ResponseError, match="503"):
            await LoadClient(Target.from_url(url)).get_json("/v1/models")


async def read_in_pieces(answer, sizes):
    """Return the body of an answer that arrives in pieces of these sizes."""
    reader = asyncio.StreamReader()
    response = Response(reader)
    reading = asyncio.create_task(response.read_head())
    for piece in in_pieces(answer, sizes):
        reader.feed_data(piece)
        await asyncio.sleep(0)
    reader.feed_eof()
    await reading
    assert response.status == 200
    return await response.read()


@given(st.lists(st.integers(1, 30), max_size=30), st.integers(1, 40))
def test_chunked_bodies_decode_whatever_the_pieces(sizes, chunk_size):
    head = b"HTTP/1.1 200 OK\r\nTRANSFER-Encoding: Chunked\r\n\r\n"
    answer = head + as_chunked(STREAM, chunk_size)
    assert asyncio.run(read_in_pieces(answer, sizes)) == STREAM


@given(st.lists(st.integers(1, 30), max_size=30))
def test_what_follows_a_body_is_not_read(sizes):
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\n"
    assert asyncio.run(read_in_pieces(head + b"hello and more", sizes)) == b"hello"


@given(st.lists(st.integers(1, 30), max_size=30), st.sampled_from([b"\n", b"\r\n"]))
def test_events_are_split_whatever_the_pieces_and_line_ends(sizes, line_end):
    parser = SSEParser()
    pieces = in_pieces(STREAM.replace(b"\n", line_end), sizes)
    events = [event for piece in pieces for event in parser.feed(piece)]
    assert [json.loads(event) for event in events] == EVENTS


def test_running_counts_are_turned_into_tokens_of_a_chunk():
    record = RequestRecord(index=0, start_s=0.0)
    events = StreamEvents(record)
    for counted, text in ((3, "a"), (4, "b")):
        event = {"choices": [{"text": text}], "usage": {"completion_tokens": counted}}
        events.take(json.dumps(event).encode(), 1.0)
    assert record.chunk_tokens == [3, 1]


def test_tokens_of_events_without_text_belong_to_the_next_chunk():
    """Some tokens have no text of their own, such as the first bytes of a character."""
    record = RequestRecord(index=0, start_s=0.0)
    events = StreamEvents(record)
    for counted, text in ((0, ""), (1, "a"), (2, ""), (4, "b"), (5, ""), (5, "")):
        event = {"choices": [{"text": text}], "usage": {"completion_tokens": counted}}
        events.take(json.dumps(event).encode(), 1.0)
    assert record.chunk_tokens == [1, 3]
    assert record.output_tokens == 5


@pytest.mark.parametrize("names", [["reasoning"], ["reasoning_content"], list(REASONING_KEYS)])
def test_reasoning_is_text_under_any_of_its_names(names):
    record = RequestRecord(index=0, start_s=0.0)
    events = StreamEvents(record)
    for delta in (dict.fromkeys(names, "Hm. "), {"content": "Yes."}):
        events.take(json.dumps({"choices": [{"delta": delta}]}).encode(), 1.0)
    events.check_complete()
    assert record.text == "Hm. Yes."


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://"])
def test_an_address_without_scheme_or_host_is_refused(url):
    with pytest.raises(ValueError, match="address"):
        Target.from_url(url)


def test_an_address_may_have_a_prefix_and_the_schemes_have_their_ports():
    assert Target.from_url("https://host/api/") == Target("host", 443, "/api", True)
    assert Target.from_url("http://host").port == 80
    assert Target.from_url("https://host/api/v1/") == Target("host", 443, "/api", True)


async def test_a_closed_loop_keeps_its_number_in_flight_and_answers_in_order():
    in_flight, most = 0, 0

    async def send(planned):
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        for _ in range(1 + planned.index % 3):
            await asyncio.sleep(0)
        in_flight -= 1
        return RequestRecord(index=planned.index, start_s=0.0)

    seen = []
    requests = [make_planned(index) for index in range(20)]
    records = await closed_loop(requests, send, concurrency=4, on_record=seen.append)
    assert most == 4
    assert [record.index for record in records] == list(range(20))
    assert len(seen) == 20


async def test_an_open_loop_does_not_wait_for_answers():
    started = []
    gate = asyncio.Event()

    async def send(planned):
        started.append(planned.index)
        if len(started) == 5:
            gate.set()
        await gate.wait()
        return RequestRecord(index=planned.index, start_s=0.0)

    records = await open_loop([make_planned(index) for index in range(5)], send)
    assert [record.index for record in records] == list(range(5))


async def test_an_open_loop_with_a_cap_holds_requests_back():
    most, in_flight = 0, 0

    async def send(planned):
        nonlocal most, in_flight
        in_flight += 1
        most = max(most, in_flight)
        await asyncio.sleep(0)
        in_flight -= 1
        return RequestRecord(index=planned.index, start_s=0.0)

    await open_loop([make_planned(index) for index in range(9)], send, max_concurrency=2)
    assert most == 2
