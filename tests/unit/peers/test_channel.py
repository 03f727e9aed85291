"""Messages between the server's process and the engines' process."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.parsing import registry
from mlx_parallm.parsing.reasoning import REASONING_FORMATS
from mlx_parallm.peers import channel
from mlx_parallm.peers.channel import Channel, UnreadableError
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
