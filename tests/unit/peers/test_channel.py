"""Messages between the server's process and the engines' process."""

from __future__ import annotations

import errno
import pickle
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.parsing import registry
from mlx_parallm.parsing.turn import REASONING_FORMATS
from mlx_parallm.peers import channel
from mlx_parallm.peers.channel import Channel, Incoming, UnreadableError, pack, pack_shared
from mlx_parallm.peers.messages import Events
from mlx_parallm.tokenizer.lanes import OwnLock
from mlx_parallm.types.errors import ControlError, StepError
from mlx_parallm.types.events import (
    ErrorEvent,
    FinishReason,
    GenerateEvent,
    PromptEvent,
    TokenEvent,
)
from mlx_parallm.types.pooling import PoolingResults
from mlx_parallm.types.step import TokenLogprob
from tests.fakes import ByteTokenizer, make_info

Ends = tuple[Channel, Channel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = (Channel(end) for end in socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def sent(ends: Ends, message: object) -> object:
    """Return a message as the other end receives it.

    It is sent on a thread, because one that the sockets cannot hold waits for a reader.
    """
    thread = threading.Thread(target=ends[0].send, args=(message, 7))
    thread.start()
    received, number = ends[1].receive()
    thread.join()
    assert number == 7
    return received


@pytest.mark.parametrize("slice_bytes", [1 << 30, 999])
def test_large_arrays_cross_beside_the_pickle(
    ends: Ends, slice_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "SLICE_BYTES", slice_bytes)
    rows = np.arange(300_000, dtype=np.float32).reshape(3, -1)
    results = PoolingResults([rows, rows[:0], rows.T, rows[:, ::2]], [True, False, True, False])
    message = sent(ends, {"results": results, "tensor": HostTensor(rows.view(np.uint32))})
    assert isinstance(message, dict)
    assert message["results"].cache_hits == results.cache_hits
    for result, original in zip(message["results"], results, strict=True):
        np.testing.assert_array_equal(result, original)
    np.testing.assert_array_equal(message["tensor"].array, rows.view(np.uint32))
    assert sent(ends, "next") == "next"


@pytest.mark.parametrize("buffer_bytes", [1, 30, 1 << 17])
def test_messages_that_came_together_are_told_apart(
    buffer_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "BUFFER_BYTES", buffer_bytes)
    ours, theirs = (Channel(end) for end in socket.socketpair())
    messages = [bytes(size) for size in (0, 1, 29, 3000)] * 4
    for number, message in enumerate(messages):
        ours.send(message, number)
    ours.close()
    assert [theirs.receive() for _ in messages] == list(zip(messages, range(16), strict=True))
    with pytest.raises(EOFError):
        theirs.receive()
    theirs.close()


def test_what_cannot_be_pickled_is_not_sent_at_all(ends: Ends) -> None:
    class Odd:
        def __reduce__(self) -> str:
            raise RecursionError("too deep")

    for odd, why in ((lambda: None, "pickle"), (Odd(), "RecursionError: too deep")):
        with pytest.raises(ControlError, match=why):
            ends[0].send(["before", odd])
    assert sent(ends, "whole") == "whole"


class Unknown:
    """Cannot be made where it arrives."""

    def __reduce__(self) -> tuple[object, ...]:
        return __import__, ("no_such_module",)


def test_what_cannot_be_unpickled_is_told_by_its_number(ends: Ends) -> None:
    ends[0].send(Unknown(), 5)
    with pytest.raises(UnreadableError, match="no_such_module") as problem:
        ends[1].receive()
    assert problem.value.number == 5
    assert sent(ends, "next") == "next"


def test_an_end_that_is_gone_is_told(ends: Ends) -> None:
    ends[0].send("last")
    ends[0].close()
    assert ends[1].receive() == ("last", 0)
    with pytest.raises(EOFError):
        ends[1].receive()
    with pytest.raises(OSError):  # noqa: PT011 - which one depends on the system
        ends[1].send("nobody")


TEXTS = st.text(max_size=4)
TOKENS = st.builds(
    TokenEvent,
    request_id=TEXTS,
    index=st.integers(0, 3),
    token_ids=st.tuples(st.integers(0, 9)),
    text=TEXTS,
    logprobs=st.lists(st.builds(TokenLogprob, st.integers(0, 9), st.floats(-9, 0))).map(tuple),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    stop_reason=st.none() | st.integers(0, 9) | TEXTS,
    version=TEXTS,
)


@given(events=st.lists(TOKENS | st.builds(PromptEvent, request_id=TEXTS)))
def test_events_are_packed_and_unpacked(events: list[GenerateEvent]) -> None:
    assert pickle.loads(pickle.dumps(Events(events))).events == events


def test_errors_of_a_step_are_events_too() -> None:
    events = Events([ErrorEvent(request_id="a", error=StepError("x"))])
    (event,) = pickle.loads(pickle.dumps(events)).events
    assert isinstance(event, ErrorEvent)
    assert (event.request_id, str(event.error)) == ("a", "x")


FORMATS = [(tools, None) for tools in registry.tool_format_names()] + [
    (None, known.name) for known in REASONING_FORMATS
]


@pytest.mark.parametrize(("tools", "reasoning"), FORMATS)
def test_a_model_crosses_with_every_format(tools: str | None, reasoning: str | None) -> None:
    model = GenerationModel(
        names=("m",),
        root="m",
        created=1,
        tokenizer=ByteTokenizer(),
        info=make_info(),
        tool_format=None if tools is None else registry.tool_format(tools),
        reasoning_format=None if reasoning is None else registry.reasoning_format(reasoning),
    )
    unpacked = pickle.loads(pickle.dumps(model.packed())).unpack(cast("Any", None))
    assert unpacked.tool_format is model.tool_format
    assert unpacked.reasoning_format is model.reasoning_format
    assert (unpacked.names, unpacked.info, unpacked.grammars) == (model.names, model.info, None)


def test_a_held_lock_is_free_in_the_other_process() -> None:
    lock = OwnLock()
    with lock, pickle.loads(pickle.dumps(lock)):
        pass


@given(
    st.lists(st.binary(max_size=40) | st.lists(st.integers(0, 40), max_size=3)),
    st.integers(1, 60),
)
def test_messages_come_out_whole_from_any_pieces(
    contents: list[bytes | list[int]], piece: int
) -> None:
    """Numbers in a list are lengths of arrays, which are beside the pickle."""
    messages = [
        each if isinstance(each, bytes) else [np.arange(count) for count in each]
        for each in contents
    ]
    data = b"".join(
        part for number, each in enumerate(messages) for part in pack(each).parts(number)
    )
    incoming, received = Incoming(), list[tuple[Any, int]]()
    while data:
        assert incoming.missing > 0
        count = min(piece, incoming.missing)
        if (message := incoming.feed(data[:count])) is not None:
            received.append(message)
        data = data[count:]
    assert [number for _, number in received] == list(range(len(messages)))
    for (message, _), sent in zip(received, messages, strict=True):
        np.testing.assert_equal(message, sent)


LARGE = [np.arange(count, dtype=np.float32) for count in (300_000, 3, 0, 1_000)]


def test_large_arrays_for_several_processes_are_sent_to_none_of_them() -> None:
    packed = pack_shared({"arrays": LARGE, "transposed": LARGE[0].reshape(2, -1).T})
    assert packed.file is not None
    assert sum(part.nbytes for part in packed.parts(1)) < 1000
    for number in range(3):
        ours, theirs = (Channel(end) for end in socket.socketpair())
        with closing(ours), closing(theirs):
            ours.send("before")
            ours.send_packed(packed, number)
            ours.send("after")
            assert theirs.receive()[0] == "before"
            message, received = theirs.receive()
            assert received == number
            for array, original in zip(message["arrays"], LARGE, strict=True):
                np.testing.assert_array_equal(array, original)
            np.testing.assert_array_equal(message["transposed"], LARGE[0].reshape(2, -1).T)
            # No other process sees what one writes.
            message["arrays"][0][:] = -1
            assert theirs.receive()[0] == "after"


def test_small_arrays_are_sent_to_each_process() -> None:
    assert pack_shared(LARGE[1:]).file is None


def test_arrays_that_no_file_has_room_for_are_sent(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(buffers: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(channel, "SharedFile", refuse)
    packed = pack_shared(LARGE)
    assert packed.file is None
    sender = threading.Thread(target=ends[0].send_packed, args=(packed, 1))
    sender.start()
    message, _ = ends[1].receive()
    sender.join()
    np.testing.assert_array_equal(message[0], LARGE[0])


def test_a_file_without_room_for_its_descriptor_spoils_only_its_message(ends: Ends) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    first, second = (pack_shared(array) for array in (LARGE[0], np.ones(300_000)))
    ends[0].send_packed(first, 1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(UnreadableError) as raised:
            ends[1].receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert raised.value.number == 1
    ends[0].send_packed(second, 2)
    received, number = ends[1].receive()
    assert number == 2
    np.testing.assert_array_equal(received, np.ones(300_000))
