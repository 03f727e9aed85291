"""Two ranks on threads of one process with a simulated model; the streams between them are real.

The leader and the follower are the product's own, and so is the engine above. The model is that of
``rank_simulator``.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from mlx_parallm.distributed.follower import Follower
from mlx_parallm.distributed.leader import LeadingWorker
from mlx_parallm.distributed.link import FollowerLink, LeaderLink, Message
from mlx_parallm.distributed.log import LeaderLog
from mlx_parallm.distributed.watch import Watch
from mlx_parallm.worker.device.ranks import Ranks
from mlx_parallm.worker.worker import Worker
from tests.rank_simulator import Meeting, Record, SimulatedLoader, SimulatedSpec


class Progress:
    """Counts the ops of a rank. Implements ``log.Progress``."""

    def __init__(self) -> None:
        self.num_begun = self.num_ended = 0

    def begin(self, limit_s: float | None = None) -> None:
        """Count a begin."""
        del limit_s
        self.num_begun += 1

    def end(self) -> None:
        """Count an end."""
        self.num_ended += 1


@dataclass
class RecordedLeader:
    """A link that notes each entry. Implements ``log.Link``."""

    link: LeaderLink
    record: Record

    def send(self, kind: int, payload: Any) -> int:
        """See ``LeaderLink``."""
        self.record.begin(self.link.num_messages + 1, kind)
        return self.link.send(kind, payload)

    def replies(self, number: int) -> list[Any]:
        """See ``LeaderLink``."""
        return self.link.replies(number)


@dataclass
class RecordedFollower:
    """A link that notes each entry."""

    link: FollowerLink
    record: Record

    def receive(self) -> Message | None:
        """See ``FollowerLink``."""
        message = self.link.receive()
        if message is not None:
            self.record.begin(message.number, message.kind)
        return message

    def reply(self, number: int, value: Any) -> None:
        """See ``FollowerLink``."""
        self.link.reply(number, value)


class SimulatedWorld:
    """Rank 0 on the thread that makes this, and rank 1 on another.

    Attributes:
        worker: rank 0's.
        loaders: have the models, by rank.
        workers: all, by rank.
    """

    def __init__(self) -> None:
        logs, beats = socket.socketpair(), socket.socketpair()
        self._beats = beats
        self._link = LeaderLink({1: logs[0]}, {1: beats[0]})
        self._followers_link = FollowerLink(1, logs[1], beats[1])
        self._meeting = Meeting()
        self.records = [Record(), Record()]
        self.progress = [Progress(), Progress()]
        self.loaders = [SimulatedLoader(rank, self._meeting, self.records[rank]) for rank in (0, 1)]
        log = LeaderLog(RecordedLeader(self._link, self.records[0]), self.progress[0], self._fail)
        nowhere = [Ranks(rank, 2, "simulated", None) for rank in (0, 1)]
        self.worker = LeadingWorker(nowhere[0], log, (SimulatedSpec,))
        self.workers = [self.worker, Worker(ranks=nowhere[1])]
        for worker, loader in zip(self.workers, self.loaders, strict=True):
            worker.install(SimulatedSpec, loader)
        self._failure: BaseException | None = None
        self._follower = Follower(
            nowhere[1],
            cast("FollowerLink", RecordedFollower(self._followers_link, self.records[1])),
            cast("Watch", self.progress[1]),
            self.workers[1],
            lambda load: load,
        )
        self._thread = threading.Thread(target=self._follow, name="rank 1", daemon=True)
        self._thread.start()

    def _fail(self, reason: str) -> None:
        raise AssertionError(f"rank 0 ends: {reason}") from self._failure

    def _follow(self) -> None:
        try:
            self._follower.run()
        except BaseException as problem:  # noqa: BLE001 - it is raised in ``end``
            self._failure = problem
            self._meeting.lose(problem)
        finally:
            self._followers_link.close()

    def end(self) -> None:
        """Say goodbye, and check that both ranks were, and did, the same at every position."""
        self._link.close(goodbye=self._failure is None)
        self._thread.join()
        for end in self._beats:
            end.close()
        if self._failure is not None:
            raise AssertionError("rank 1 failed") from self._failure
        first, second = (record.entries for record in self.records)
        assert first == second
        assert self._meeting.are_even
        for worker in self.workers:
            assert not worker._models
            assert not worker._tensors, "tensors that no op names any more"
        for progress in self.progress:
            assert progress.num_begun == progress.num_ended == len(first)

    def abandon(self) -> None:
        """End after a failure."""
        self._link.close(goodbye=False)
        self._thread.join()
        for end in self._beats:
            end.close()


@contextmanager
def simulated_world() -> Iterator[SimulatedWorld]:
    """Yield two ranks, which must have done the same when the block ends."""
    world = SimulatedWorld()
    try:
        yield world
    except BaseException:
        world.abandon()
        raise
    world.end()


def lone_worker() -> Worker:
    """Return the worker of one process."""
    worker = Worker()
    worker.install(SimulatedSpec, SimulatedLoader(None, Meeting(), Record()))
    return worker
