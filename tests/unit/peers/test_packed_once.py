"""Commands to several engines are pickled once."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from typing import Any, cast

from mlx_parallm.engine.commands import Call, EngineCommand, LeavesNothing, Stop
from mlx_parallm.engine.parallel.life import ParallelLife
from mlx_parallm.engine.parallel.router import Router
from mlx_parallm.peers.channel import Channel
from mlx_parallm.peers.life import Link
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
