"""Removes samples and requests that have ended, wherever they are."""

from __future__ import annotations

from mlx_parallm.generation.scheduler.beams.live import LiveBeams
from mlx_parallm.generation.scheduler.running import LiveRequests, RunningSet
from mlx_parallm.generation.scheduler.sequence import RequestGroup, Sequence
from mlx_parallm.generation.scheduler.snapshotting import Snapshotter
from mlx_parallm.generation.scheduler.updates import SequenceUpdate
from mlx_parallm.generation.scheduler.waiting import WaitingQueue


class Endings:
    """Frees what samples hold, and drops their records."""

    def __init__(
        self,
        waiting: WaitingQueue,
        running: RunningSet,
        live: LiveRequests,
        beams: LiveBeams,
        snapshotter: Snapshotter,
    ) -> None:
        self._waiting = waiting
        self._running = running
        self._live = live
        self._beams = beams
        self._snapshotter = snapshotter
        # Ended sequences with a grammar that no batch has listed yet.
        self._constrained: list[int] = []

    def take_constrained(self) -> tuple[int, ...]:
        """Return the sequences with a grammar that have ended since the last call."""
        ended, self._constrained = tuple(self._constrained), []
        return ended

    def end(self, sequence: Sequence) -> None:
        """Remove a sample from running or waiting; its first follower becomes the leader.

        The beams of a request end together.
        """
        if sequence.request.params.beams is not None:
            self.end_request(sequence.group)
            return
        successor = None
        if sequence.followers:
            successor, *successor.followers = sequence.followers
        if sequence.slot is not None:
            self._running.stop(sequence)
            if successor is not None:
                self._waiting.push_front(successor)
        elif not self._waiting.remove(sequence, successor):
            leader = next(s for s in sequence.group.sequences.values() if sequence in s.followers)
            leader.followers.remove(sequence)
        self._forget(sequence)

    def end_request(self, group: RequestGroup) -> None:
        """Remove all samples of a request."""
        sequences = list(group.sequences.values())
        # Followers and beams are in no queue. Handing the lead from one to the next, as ``end``
        # does, would take n² steps.
        hidden = {follower for sequence in sequences for follower in sequence.followers}
        hidden |= self._beams.forget(group)
        for sequence in sequences:
            if sequence.slot is not None:
                self._running.stop(sequence)
            elif sequence not in hidden:
                self._waiting.remove(sequence)
            self._forget(sequence)

    def fail(self, group: RequestGroup, message: str) -> list[SequenceUpdate]:
        """End every remaining sample of a request."""
        self._snapshotter.fail_group(group)
        updates = [
            SequenceUpdate(request_id=group.request.request_id, index=index, error=message)
            for index in group.sequences
            # There may be more beams than results.
            if index < group.request.params.n
        ]
        for sequence in list(group.sequences.values()):
            self.end(sequence)
        return updates

    def _forget(self, sequence: Sequence) -> None:
        """Drop the records of a sample that neither runs nor waits."""
        self._running.end_fetch(sequence)
        self._live.forget(sequence)
        if sequence.request.params.grammar is not None:
            self._constrained.append(sequence.seq_id)
