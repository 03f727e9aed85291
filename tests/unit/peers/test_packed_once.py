"""Commands to several engines are pickled once, and kept no longer than they are needed."""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from typing import Any, cast

import numpy as np
import pytest

from mlx_parallm.engine.commands import Call, EngineCommand, LeavesNothing, Once, Stop
from mlx_parallm.engine.parallel.life import ParallelLife
from mlx_parallm.engine.parallel.router import Router
from mlx_parallm.peers.channel import Channel
from mlx_parallm.peers.life import Link, _forward
from tests.fleet_harness import FakeLife

NUM_ENGINES = 3


class Upload(LeavesNothing, EngineCommand[str]):
    """A command that counts how often it is pickled."""

    num_pickles = 0

    def __call__(self, loop: object) -> str:
        return "done"

    def __reduce__(self) -> tuple[Callable[[], Upload], tuple[()]]:
        self.num_pickles += 1
        return Upload, ()


class SendingLife(FakeLife):
    """Carries out commands here, and sends them too, as the life of a process does."""

    def __init__(self) -> None:
        super().__init__()
        ours, theirs = socket.socketpair()
        self.channel, self.process = Channel(ours), Channel(theirs)
        self.link = Link(self.channel)

    def put(self, command: Any) -> None:
        self.link.send(command)
        super().put(command)


def test_a_command_for_several_engines_is_pickled_once() -> None:
    lives = [SendingLife() for _ in range(NUM_ENGINES)]
    life = ParallelLife(cast(Any, lives), partial(Router, NUM_ENGINES, max_num_seqs=1))
    loaded: Future[object] = Future()
    thread = threading.Thread(target=life.run, args=(lambda events: None, loaded.set_result))
    thread.start()
    loaded.result()
    uploads = [Upload(), Upload()]
    for upload in uploads:
        done: Future[object] = Future()
        life.put(Call(action=upload, reply=done.set_result))
        assert done.result() == "done"
    life.put(Stop())
    thread.join()
    assert [upload.num_pickles for upload in uploads] == [1, 1]
    for each in lives:
        with closing(each.channel), closing(each.process) as process:
            for number in (1, 2):
                received, sent_number = process.receive()
                assert isinstance(received.action, Upload)
                assert sent_number == number


class Outbox:
    """A queue that looks at what a sender keeps while it waits for the next message."""

    def __init__(self, message: Call) -> None:
        self._messages = [message]
        self._action = weakref.ref(cast(Weights, message.action))
        self.is_kept: list[bool] = []

    def get(self) -> Call | None:
        if self._messages:
            return self._messages.pop()
        self.is_kept.append(self._action() is not None)
        return None


class Weights(LeavesNothing, EngineCommand[str]):
    """An upload of large tensors."""

    def __init__(self) -> None:
        self.rows = np.zeros(300_000)

    def __call__(self, loop: object) -> str:
        return "done"


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = map(Channel, socket.socketpair(), socket.socketpair())
    with closing(ours), closing(theirs):
        yield ours, theirs


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("is_gone", [False, True])
def test_tensors_that_were_sent_are_not_kept_until_the_next_message(
    ends: tuple[Channel, Channel], is_shared: bool, is_gone: bool
) -> None:
    ours, theirs = ends
    if is_gone:
        theirs.close()
    packed = Once[Any]() if is_shared else None
    outbox = Outbox(Call(action=Weights(), reply=lambda _: None, packed=packed))
    del packed
    sender = threading.Thread(target=_forward, args=(outbox, Link(ours), ours))
    sender.start()
    if not is_gone:
        theirs.receive()
    sender.join()
    assert outbox.is_kept == [False]


@pytest.mark.parametrize("keeps_copies", [False, True])
def test_a_file_stays_open_until_its_reply_where_the_system_may_collect_it(
    ends: tuple[Channel, Channel], keeps_copies: bool
) -> None:
    ours, theirs = ends
    link, replies = Link(ours, keeps_copies=keeps_copies), list[object]()
    packed = Once[Any]()
    link.send(Call(action=Weights(), reply=replies.append, packed=packed))
    file = weakref.ref(packed.get(lambda: pytest.fail("it is packed")).file)
    del packed
    assert (file() is not None) == keeps_copies
    message, number = theirs.receive()
    np.testing.assert_array_equal(message.action.rows, np.zeros(300_000))
    link.settle(number, "done")
    assert replies == ["done"]
    assert file() is None
