"""Messages between the server's process and the engines' process."""

from __future__ import annotations

import errno
import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from itertools import count
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
from mlx_parallm.peers.channel import (
    Channel,
    Incoming,
    Packed,
    SharedFile,
    UnreadableError,
    pack,
    pack_shared,
)
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
from tests.descriptors import no_descriptor_allowed, no_descriptor_left
from tests.fakes import ByteTokenizer, make_info

Ends = tuple[Channel, Channel]


def channels() -> Ends:
    """Return both ends of a channel that carries descriptors of files."""
    ours, theirs = map(Channel, socket.socketpair(), socket.socketpair())
    return ours, theirs


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = channels()
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
        ours, theirs = channels()
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


def carried(ends: Ends, packed: Packed, number: int) -> Any:
    """Return a packed message as the other end receives it."""
    sender = threading.Thread(target=ends[0].send_packed, args=(packed, number))
    sender.start()
    message, received = ends[1].receive()
    sender.join()
    assert received == number
    return message


@pytest.mark.parametrize(
    "reason", [errno.ETOOMANYREFS, errno.EMSGSIZE, errno.ENOBUFS, errno.EAGAIN, errno.EBADF]
)
def test_a_file_whose_descriptor_is_refused_is_sent_as_bytes(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    refusals, send_fds = [OSError(reason, os.strerror(reason))], socket.send_fds

    def refuse(*arguments: Any) -> int:
        if refusals:
            raise refusals.pop()
        return send_fds(*arguments)

    monkeypatch.setattr(socket, "send_fds", refuse)
    for number in range(2):
        np.testing.assert_equal(carried(ends, pack_shared(LARGE), number), LARGE)


def test_messages_whose_files_a_full_socket_refuses_arrive_in_order(ends: Ends) -> None:
    files = ends[0]._files
    assert files is not None
    files._end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    packed = pack_shared(LARGE)
    refused: list[bool] = []
    send = files.send

    def noting(file: SharedFile) -> bool:
        refused.append(not send(file))
        return not refused[-1]

    files.send = noting  # type: ignore[method-assign]

    def send_all() -> None:
        while not any(refused):
            ends[0].send_packed(packed, len(refused))
        ends[0].send("last")

    sender = threading.Thread(target=send_all)
    sender.start()
    for number in count():
        message, received = ends[1].receive()
        if message == "last":
            break
        assert received == number
        np.testing.assert_equal(message, LARGE)
    sender.join()
    assert refused[-1]


def test_a_file_for_a_process_that_is_gone_is_an_error(ends: Ends) -> None:
    ends[1].close()
    with pytest.raises(OSError):  # noqa: PT011 - which one depends on the system
        ends[0].send_packed(pack_shared(LARGE))


def test_a_file_arrives_while_no_descriptor_is_left(ends: Ends) -> None:
    """Keep the spare descriptor for the next one, so map nothing, which takes another."""
    packed = pack_shared(LARGE)
    with no_descriptor_left():
        for number in range(3):
            np.testing.assert_equal(carried(ends, packed, number), LARGE)
            with pytest.raises(OSError, match="Too many open files"):
                os.dup(0)
    np.testing.assert_equal(carried(ends, packed, 3), LARGE)


def test_the_copy_of_a_file_is_made_in_parts(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "SLICE_BYTES", 1_000)
    with no_descriptor_left():
        np.testing.assert_equal(carried(ends, pack_shared(LARGE), 1), LARGE)


def spoiled_and_next(ends: Ends, spoil: Callable[[], AbstractContextManager[None]]) -> None:
    """Send two messages with files, of which the first cannot be read."""
    first, second = (pack_shared(array) for array in (LARGE[0], np.ones(300_000)))
    ends[0].send_packed(first, 1)
    with spoil(), pytest.raises(UnreadableError, match="no descriptor is left") as raised:
        ends[1].receive()
    assert raised.value.number == 1
    np.testing.assert_array_equal(carried(ends, second, 2), np.ones(300_000))


def test_a_descriptor_whose_place_is_taken_spoils_only_its_message(ends: Ends) -> None:
    spoiled_and_next(ends, no_descriptor_allowed)


@pytest.mark.parametrize("reason", channel.NO_ROOM)
def test_a_system_that_refuses_to_read_a_descriptor_spoils_only_its_message(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    """Keep the byte that the descriptor came with, as macOS does."""

    @contextmanager
    def refusing() -> Iterator[None]:
        def refuse(*_: object) -> None:
            raise OSError(reason, os.strerror(reason))

        with monkeypatch.context() as patch:
            patch.setattr(socket, "recv_fds", refuse)
            yield

    spoiled_and_next(ends, refusing)


def test_a_channel_leaves_no_descriptor_open() -> None:
    before = os.listdir("/dev/fd")
    ends = channels()
    np.testing.assert_equal(carried(ends, pack_shared(LARGE), 1), LARGE)
    for end in ends:
        end.close()
    assert os.listdir("/dev/fd") == before
