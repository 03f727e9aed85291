"""Files and batches by the real client, over an engine that tests play."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai.types import Batch

from mlx_parallm.config import EngineConfig, SchedulerConfig
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.errors import OverloadedError
from tests.batch_gate import INT64, POLL_S, Gate
from tests.fake_engine import FakeEngine, serve_fake

NUM_SEQS = 8


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.engine_config = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=NUM_SEQS))
    return engine


@pytest.fixture
def url(engine: FakeEngine, tmp_path: Path) -> Iterator[str]:
    config = ServerConfig(
        data_dir=str(tmp_path / "data"), api_keys=("one", "two"),
        max_file_bytes=20_000, max_files_bytes=60_000,
    )  # fmt: skip
    with serve_fake(engine, config, max_waiting=40) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="one", max_retries=0) as client:
        yield client


@pytest.fixture
def stranger(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="two", max_retries=0) as client:
        yield client


def line(name: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    fields = {"model": "alias", "prompt": "say"} | body
    return {"custom_id": name, "method": "POST", "url": url, "body": fields}


def upload(client: openai.OpenAI, *entries: Any, purpose: Any = "batch") -> str:
    content = "\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in entries)
    return client.files.create(file=("in.jsonl", content.encode()), purpose=purpose).id


def begin(client: openai.OpenAI, *entries: Any, endpoint: Any = "/v1/completions") -> Batch:
    return client.batches.create(
        input_file_id=upload(client, *entries), endpoint=endpoint, completion_window="24h"
    )


def until(client: openai.OpenAI, batch: Batch, is_so: Callable[[Batch], bool]) -> Batch:
    while not is_so(batch):
        time.sleep(POLL_S)
        batch = client.batches.retrieve(batch.id)
    return batch


def has_ended(batch: Batch) -> bool:
    return batch.status in ("completed", "failed", "expired", "cancelled")


def content_of(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_a_file_is_stored_listed_read_and_deleted(client: openai.OpenAI) -> None:
    made = [
        client.files.create(
            file=(f"{name}.txt", name.encode()),
            purpose="user_data",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        for name in "abc"
    ]
    assert made[0].filename == "a.txt"
    assert (made[0].bytes, made[0].object, made[0].status) == (1, "file", "processed")
    assert made[0].expires_at == made[0].created_at + 3600
    ids = [file.id for file in made]
    assert [file.id for file in client.files.list(order="asc", limit=2)] == ids
    assert [file.id for file in client.files.list()] == ids[::-1]
    page = client.files.list(limit=2)
    assert page.has_next_page()
    assert [file.id for file in client.files.list(purpose="batch")] == []
    assert client.files.retrieve(ids[1]) == made[1]
    answer = client.files.content(ids[1])
    assert answer.content == b"b"
    assert 'filename="b.txt"' in answer.response.headers["content-disposition"]
    assert client.files.delete(ids[1]).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(ids[1])


def test_input_of_batches_goes_after_a_month(client: openai.OpenAI) -> None:
    file = client.files.retrieve(upload(client, line("a")))
    assert file.expires_at == file.created_at + 30 * 24 * 3600


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "purpose"),
        ({"purpose": "fun"}, "purpose"),
        ({"purpose": "batch", "expires_after[seconds]": "60"}, "expires_after[seconds]"),
        ({"purpose": "batch", "expires_after[anchor]": "never"}, "expires_after[anchor]"),
    ],
)
def test_a_bad_upload_names_its_field_and_leaves_nothing(
    url: str, tmp_path: Path, fields: dict[str, str], param: str
) -> None:
    headers = {"authorization": "Bearer one"}
    files = {"file": ("a", b"x")}
    response = httpx2.post(f"{url}/v1/files", headers=headers, data=fields, files=files)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert list((tmp_path / "data" / "files").iterdir()) == []


def test_uploads_have_limits_of_their_own_and_leave_nothing(
    client: openai.OpenAI, url: str, tmp_path: Path
) -> None:
    with pytest.raises(openai.APIStatusError) as refusal:
        client.files.create(file=("big", b"x" * 20_001), purpose="batch")
    assert refusal.value.status_code == 413
    # The upload has its declared length but another type, so it is refused without being read.
    headers = {"authorization": "Bearer one", "content-type": "application/json"}
    response = httpx2.post(f"{url}/v1/files", headers=headers, content=b"[" * 20_000)
    assert response.status_code == 400
    for _ in range(3):
        client.files.create(file=("full", b"x" * 19_000), purpose="batch")
    with pytest.raises(openai.APIStatusError, match="together"):
        client.files.create(file=("more", b"x" * 9_000), purpose="batch")
    assert len(list((tmp_path / "data" / "files").iterdir())) == 3


@pytest.mark.parametrize("query", ["limit=0", "limit=10001", "order=up", "after=x", "limit=x"])
def test_a_bad_page_is_a_bad_request(url: str, query: str) -> None:
    response = httpx2.get(f"{url}/v1/files?{query}", headers={"x-api-key": "one"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == query.partition("=")[0]


def test_a_batch_is_answered_into_two_files(client: openai.OpenAI, engine: FakeEngine) -> None:
    entries = [line("good"), line("lost", model="nobody"), line("bad", n=1000)]
    batch = until(client, begin(client, *entries, line("last")), has_ended)
    assert batch.status == "completed", batch
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 4, "completed": 2, "failed": 2}
    output = content_of(client, batch.output_file_id)
    assert [answer["custom_id"] for answer in output] == ["good", "last"]
    assert output[0]["response"]["body"]["choices"][0]["text"] == "hello"
    assert output[0]["response"]["request_id"] == output[0]["id"]
    errors = content_of(client, batch.error_file_id)
    assert [(answer["custom_id"], answer["response"]["status_code"]) for answer in errors] == [
        ("lost", 404), ("bad", 400),
    ]  # fmt: skip
    assert errors[0]["response"]["body"]["error"]["code"] == "model_not_found"
    assert batch.usage is not None
    assert batch.usage.output_tokens == 2 * len(b"hello\0")
    files = {file.id: file.purpose for file in client.files.list()}
    assert files[batch.output_file_id or ""] == "batch_output"


def test_chat_is_batched_too(client: openai.OpenAI) -> None:
    chat = line("a", "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
    batch = until(client, begin(client, chat, endpoint="/v1/chat/completions"), has_ended)
    (answer,) = content_of(client, batch.output_file_id)
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == "hello"


def test_batches_are_listed_newest_first_and_strangers_see_none(
    client: openai.OpenAI, stranger: openai.OpenAI
) -> None:
    batches = [until(client, begin(client, line("a")), has_ended) for _ in range(3)]
    assert [batch.id for batch in client.batches.list(limit=2)] == [
        batch.id for batch in batches[::-1]
    ]
    assert list(stranger.batches.list()) == []
    assert list(stranger.files.list()) == []
    first = batches[0]
    assert first.output_file_id
    for call, name in (
        (stranger.batches.retrieve, first.id),
        (stranger.batches.cancel, first.id),
        (stranger.files.retrieve, first.input_file_id),
        (stranger.files.content, first.output_file_id),
        (stranger.files.delete, first.output_file_id),
    ):
        with pytest.raises(openai.NotFoundError):
            call(name)
    with pytest.raises(openai.BadRequestError) as refusal:
        stranger.batches.create(
            input_file_id=first.input_file_id, endpoint="/v1/completions", completion_window="24h"
        )
    assert refusal.value.param == "input_file_id"


def test_a_bad_file_fails_with_the_numbers_of_its_lines(client: openai.OpenAI) -> None:
    entries = [line("a"), "{", line("a"), line("b", "/v1/chat/completions"), line("c", stream=True)]
    batch = until(client, begin(client, *entries), has_ended)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [(error.line, error.code) for error in batch.errors.data or ()] == [
        (2, "invalid_json_line"), (3, "duplicate_custom_id"), (4, "mismatched_url"),
        (5, "invalid_request"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"endpoint": "/v1/files"}, "endpoint"),
        ({"endpoint": "/v1/nothing"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": "file-0"}, "input_file_id"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
    ],
)
def test_a_bad_order_names_its_field(
    client: openai.OpenAI, changes: dict[str, Any], param: str
) -> None:
    order: dict[str, Any] = {
        "input_file_id": upload(client, line("a")),
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    with pytest.raises(openai.BadRequestError) as refusal:
        client.batches.create(**order | changes)
    assert refusal.value.param == param


def test_a_batch_is_cancelled_and_its_requests_aborted(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    gate = Gate()
    engine.script = gate.script
    batch = begin(client, *[line(f"c{i}") for i in range(9)])
    waiting = [engine.submitted.get() for _ in range(NUM_SEQS // 2)]
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = until(client, batch, has_ended)
    assert batch.status == "cancelled"
    assert batch.output_file_id is None
    codes = [answer["error"]["code"] for answer in content_of(client, batch.error_file_id)]
    assert codes == ["batch_cancelled"] * 9
    aborted = {engine.aborted.get() for _ in waiting}
    assert aborted == {request.request_id for request in waiting}
    with pytest.raises(openai.BadRequestError):
        client.batches.cancel(batch.id)
    client.files.delete(batch.input_file_id)


def test_interactive_requests_go_first_and_have_room(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    gate = Gate()
    engine.script = gate.script
    entries = [line(f"c{i}", priority=-INT64) for i in range(20)]
    batch = begin(client, *entries)
    of_batch = [engine.submitted.get() for _ in range(NUM_SEQS // 2)]
    answer = client.completions.create(
        model="alias", prompt="say", extra_body={"priority": INT64 - 1}
    )
    assert answer.choices[0].text == "hello"
    # The lines wait for one another, so the only other request is the interactive one.
    interactive = engine.submitted.get()
    assert interactive.priority == INT64 - 1
    assert engine.submitted.empty()
    gate.open()
    others = of_batch + [engine.submitted.get() for _ in range(16)]
    assert min(request.priority for request in others) > interactive.priority
    # Keys take turns with batches too.
    assert {request.client for request in others} == {interactive.client} != {""}
    until(client, batch, has_ended)


def test_a_line_of_more_samples_than_half_the_queue_is_a_bad_request(client: openai.OpenAI) -> None:
    batch = until(client, begin(client, line("wide", n=21), line("fits", n=20)), has_ended)
    (error,) = content_of(client, batch.error_file_id)
    assert error["custom_id"] == "wide"
    assert error["response"]["status_code"] == 400
    assert error["response"]["body"]["error"]["param"] == "n"
    assert len(content_of(client, batch.output_file_id)[0]["response"]["body"]["choices"]) == 20


def test_a_line_refused_by_a_full_queue_is_sent_again(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    engine.refusal = OverloadedError("full")
    batch = begin(client, line("a"))
    batch = until(client, batch, lambda seen: seen.status == "in_progress")
    engine.refusal = None
    batch = until(client, batch, has_ended)
    assert batch.request_counts is not None
    assert batch.request_counts.completed == 1


def test_no_client_can_pass_for_the_server(url: str) -> None:
    for headers in ({}, {"mlx_parallm.internal_caller": "x"}, {"x-api-key": "no"}):
        assert httpx2.get(f"{url}/v1/files", headers=headers).status_code == 401


def test_without_a_data_folder_there_are_no_files() -> None:
    with serve_fake(FakeEngine()) as url:
        for path in ("/v1/files", "/v1/batches"):
            assert httpx2.get(url + path).status_code == 404


def test_a_dropped_upload_leaves_nothing(url: str, tmp_path: Path) -> None:
    def half() -> Iterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nhalf'
        raise io.UnsupportedOperation

    folder = tmp_path / "data" / "files"
    headers = {"x-api-key": "one", "content-type": "multipart/form-data; boundary=x"}
    with pytest.raises(io.UnsupportedOperation):
        httpx2.post(f"{url}/v1/files", headers=headers, content=half())
    assert httpx2.get(f"{url}/v1/files", headers=headers).json()["data"] == []
    while list(folder.iterdir()):
        time.sleep(POLL_S)
