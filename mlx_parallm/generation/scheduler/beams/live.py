"""The requests with beams that have not ended, and the forks of their blocks."""

from __future__ import annotations

from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.scheduler.beams.group import BeamGroup
from mlx_parallm.generation.scheduler.running import RunningSet
from mlx_parallm.generation.scheduler.sequence import RequestGroup, Sequence
from mlx_parallm.generation.scheduler.step_plan import StepPlan


class LiveBeams:
    """Starts, forks and stops the sequences of beams; those of a request run together or wait.

    Attributes:
        has_state: True if sequences have a state besides KV.
    """

    def __init__(self, kv: KVCacheManager, running: RunningSet, *, has_state: bool) -> None:
        """Begin without any; ``has_state`` as in the attributes."""
        self._kv = kv
        self._running = running
        self.has_state = has_state
        self._groups: dict[RequestGroup, BeamGroup] = {}

    def add(self, group: RequestGroup) -> None:
        """Begin the search of a request, whose first sequence waits for all."""
        self._groups[group] = BeamGroup(group)

    def forget(self, group: RequestGroup) -> set[Sequence]:
        """Drop the search of a request that has ended; return sequences that are in no queue."""
        beams = self._groups.pop(group, None)
        return set() if beams is None else {*group.sequences.values()} - {beams.leader}

    def of(self, sequence: Sequence) -> BeamGroup | None:
        """Return the beams that a sequence belongs to; None if it is a sample."""
        return self._groups.get(sequence.group)

    def mates(self, sequence: Sequence) -> list[Sequence]:
        """Return the running sequences that stop with a running one, itself included."""
        beams = self.of(sequence)
        return [sequence] if beams is None else beams.running

    def count_fork_blocks(self, sequence: Sequence) -> int:
        """Return how many blocks beams need besides those of the sequence that starts first."""
        beams = self.of(sequence)
        return 0 if beams is None else beams.count_fork_blocks(self._kv)

    def due(self) -> list[BeamGroup]:
        """Return the beams whose sequences are to be forked or stopped before the next step."""
        return [beams for beams in self._groups.values() if beams.is_due]

    def release(self, beams: BeamGroup) -> int:
        """Free the blocks of beams that have not been continued; return how many forks need."""
        for sequence in beams.unneeded:
            self._running.stop(sequence)
        for sequence in beams.forks:
            if sequence.slot is not None:
                self._kv.free(sequence.blocks)
        return len(beams.forks)

    def fork(self, beams: BeamGroup, plan: StepPlan) -> None:
        """Give sequences forks of their parents' blocks; there is a free block for each."""
        for sequence, parent in beams.forks.items():
            forked = self._kv.fork(parent.blocks, beams.fork_at)
            assert forked is not None, "no block for a fork"
            table, block_copy = forked
            has_room = self._kv.grow(table, beams.fork_at + 1)
            assert has_room, "no block for a beam's next token"
            if sequence.slot is None:
                sequence.held = None if parent.held is None else parent.held.fork()
                self._running.start(sequence, table, beams.fork_at)
            sequence.fork_from(parent, table)
            if block_copy is not None:
                plan.block_copies[sequence] = block_copy
            assert sequence.slot is not None
            assert parent.slot is not None
            if self.has_state:
                plan.state_copies[sequence] = (parent.slot, sequence.slot)
        beams.end_forks()

    def stop(self, beams: BeamGroup) -> Sequence:
        """Stop the sequences of beams, and return the one that waits for all."""
        for sequence in beams.running:
            self._running.stop(sequence)
        beams.restart()
        return beams.leader
