"""The simulated model of two ranks: what each rank does is recorded.

It computes by ``block_simulator``. The sums of a step are a meeting: what each rank sums must be of
the same step.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.adapters.weights import join_adapter
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.request import KV_CACHE, WEIGHTS
from mlx_parallm.types.step import (
    RunnerInfo,
    SampleSpec,
    ScheduledBatch,
    ScheduledSequence,
    StepOutput,
)
from mlx_parallm.worker.ops import (
    AddAdapter,
    Allocate,
    Checksums,
    CommitWeights,
    Done,
    DropAdapter,
    DropPrepared,
    Load,
    OneStage,
    Pending,
    PrepareWeights,
    Sleep,
    StageAdapter,
    Step,
    Wake,
)
from mlx_parallm.worker.worker import Device, Tensors
from tests.block_simulator import SimulatedRunner
from tests.fake_ranks import PATIENCE_S

#: Begins the contents that some ranks refuse; their numbers follow.
REFUSED = "refused by "
#: Ends such a content if the ranks have no memory for it.
NO_MEMORY = "!"
#: The tensor whose name is followed by the content of an update.
WEIGHT = "content "
#: Parts in which an adapter is put into a slot.
NUM_PARTS = 2


def refuse(content: str, rank: int | None) -> None:
    """Raise if a rank refuses a content; ``rank`` is None for a process that is alone."""
    if not content.startswith(REFUSED):
        return
    ranks = content.removeprefix(REFUSED).rstrip(NO_MEMORY)
    if rank is None or str(rank) in ranks:
        if content.endswith(NO_MEMORY):
            raise MemoryError(content)
        raise InvalidRequestError(content, param="weights")


class Meeting:
    """The sums of the steps: a rank gets one once all ranks have come to the same one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._came: dict[int, list[tuple[str, Any]]] = {0: [], 1: []}
        self._lost: BaseException | None = None

    def come(self, rank: int, what: str, tokens: Any = None) -> int:
        """Come to a sum of ``what``; return its number."""
        with self._changed:
            self._came[rank].append((what, tokens))
            self._changed.notify_all()
            return len(self._came[rank]) - 1

    def meet(self, rank: int, number: int) -> Any:
        """Return what the other rank brought to a sum; fail if it comes to another one."""
        other = self._came[1 - rank]
        with self._changed:
            is_there = self._changed.wait_for(
                lambda: len(other) > number or self._lost is not None, PATIENCE_S
            )
            if self._lost is not None:
                raise AssertionError("the other rank failed") from self._lost
            assert is_there, f"rank {rank} waits alone at sum {number}"
        what, tokens = other[number]
        ours = self._came[rank][number][0]
        assert what == ours, f"sum {number} is of two steps: {what}; {ours}"
        return tokens

    def lose(self, problem: BaseException) -> None:
        """Let the other rank fail too."""
        with self._changed:
            self._lost = problem
            self._changed.notify_all()

    @property
    def are_even(self) -> bool:
        """True if both ranks came to equally many sums."""
        return len(self._came[0]) == len(self._came[1])


@dataclass
class Record:
    """The entries of the log by position, and the states in which a rank ran its steps."""

    position: int = 0
    entries: dict[int, list[str]] = field(default_factory=dict[int, list[str]])

    def begin(self, position: int, kind: int) -> None:
        """Note that an entry of the log comes."""
        self.position = position
        self.entries[position] = [str(kind)]

    def add(self, text: str) -> None:
        """Note what the entry does."""
        self.entries.setdefault(self.position, []).append(text)


@dataclass(frozen=True)
class SimulatedSpec:
    """A model to be simulated.

    Attributes:
        info: its facts.
        num_slots: most sequences.
        copies: see ``SimulatedRunner``.
    """

    info: RunnerInfo
    num_slots: int
    copies: bool = False


@dataclass(frozen=True)
class SimulatedPlan:
    """Stands in for ``GenerationPlan``."""

    info: RunnerInfo
    prepares_shapes: bool = False


class RankRunner(SimulatedRunner):
    """A runner that may be given the tokens that rank 0 chooses."""

    def __init__(self, spec: SimulatedSpec) -> None:
        info = spec.info
        super().__init__(
            info.num_blocks,
            info.block_size,
            spec.num_slots,
            has_state=info.has_state,
            copies=spec.copies,
        )
        #: By sequence; None: this rank chooses.
        self.given: Mapping[int, Sequence[int]] | None = None

    def _choose(self, row: ScheduledSequence, first: SampleSpec) -> list[int]:
        if self.given is None:
            return super()._choose(row, first)
        self._read(row)
        return list(self.given[row.seq_id])

    def digest(self) -> str:
        """Return a digest of the KV and of the states."""
        kept = (self._blocks, self._block_contents, self._states, self._chosen)
        return hashlib.blake2b(repr(kept).encode(), digest_size=8).hexdigest()


class SimulatedModel:
    """Implements ``WorkerModel``.

    Attributes:
        adapters: contents that later ops may name.
        slots: the content of each slot.
        prepared: the content of prepared weights; None: there are none.
        num_in_flight: steps that were begun and not waited for.
    """

    def __init__(
        self, spec: SimulatedSpec, rank: int | None, meeting: Meeting, record: Record
    ) -> None:
        self.adapters: set[str] = set()
        self.slots: dict[int, str] = {}
        self.prepared: str | None = None
        self.num_in_flight = 0
        self._spec = spec
        self._rank = rank
        self._meeting = meeting
        self._record = record
        self._runner = RankRunner(spec)
        self._asleep: set[str] = set()

    def state(self) -> str:
        """Return all that decides what this rank computes."""
        kept = (sorted(self.adapters), sorted(self.slots.items()), self._runner.base, self.prepared)
        return f"{kept} {self._runner.digest()}"

    def begin(self, op: Any, tensors: Mapping[str, Tensors]) -> Pending[Any]:
        """See ``WorkerModel``."""
        if isinstance(op, Step):
            return self._step(op.batch)
        self._record.add(repr(op))
        return Done(self._change(op, tensors))

    def recover(self) -> None:
        """See ``WorkerModel``; a device that fails ends all ranks."""
        self._record.add("recovered")

    def release(self) -> None:
        """See ``WorkerModel``."""
        self._record.add("released")

    def _step(self, batch: ScheduledBatch) -> Pending[StepOutput]:
        assert not self._asleep, "a step of a model that sleeps"
        assert set(batch.adapters.values()) <= self.adapters, "an adapter that is not there"
        self.slots.update(batch.adapters)
        what = f"{describe(batch)} with {self.state()}"
        self._record.add(what)
        self.num_in_flight += 1
        if self._rank == 1:
            return self._follow(what, batch)
        output = self._runner.run(batch)
        tokens: dict[int, list[int]] = {}
        for token in output.tokens:
            tokens.setdefault(token.seq_id, []).append(token.token_id)
        number = None if self._rank is None else self._meeting.come(0, what, tokens)
        return _SimulatedStep(self, output, number)

    def _follow(self, what: str, batch: ScheduledBatch) -> Pending[StepOutput]:
        number = self._meeting.come(1, what)
        self._runner.given = self._meeting.meet(1, number)
        return _SimulatedStep(self, self._runner.run(batch), None)

    def end_step(self, number: int | None) -> None:
        """End a step that was begun; wait for the other rank at its sum."""
        if number is not None:
            self._meeting.meet(0, number)
        self.num_in_flight -= 1

    def _change(self, op: Any, tensors: Mapping[str, Tensors]) -> Any:
        match op:
            case Allocate():
                return SimulatedPlan(self._spec.info)
            case AddAdapter(content=content):
                join_adapter(op.layout, tensors[op.handle])
                refuse(content, self._rank)
                self.adapters.add(content)
            case StageAdapter(content=content, slot=slot, part=part):
                assert content in self.adapters, "an adapter that is not there"
                if part == NUM_PARTS - 1:
                    self.slots[slot] = content
                return part < NUM_PARTS - 1
            case DropAdapter(content=content):
                self.adapters.discard(content)
            case PrepareWeights(handle=handle):
                assert handle is not None
                return self._prepare(tensors[handle])
            case DropPrepared():
                self.prepared = None
            case Checksums():
                return {"content": self._runner.base}
            case CommitWeights() | Sleep() | Wake():
                return self._change_memory(op)
            case _:
                raise AssertionError(op)
        return None

    def _prepare(self, tensors: Tensors) -> str | None:
        (name,) = tensors
        content = name.removeprefix(WEIGHT)
        try:
            refuse(content, self._rank)
        except InvalidRequestError as refusal:
            return str(refusal)
        self.prepared = content
        return None

    def _change_memory(self, op: CommitWeights | Sleep | Wake) -> bool | None:
        assert not self.num_in_flight, "a step is in flight"
        match op:
            case CommitWeights():
                assert self.prepared is not None, "nothing was prepared"
                self._runner.base, self.prepared = self.prepared, None
            case Sleep(level=level):
                base = self._runner.base if level == 1 else ""
                self._runner = RankRunner(self._spec)
                self._runner.base, self.prepared = base, None
                self.slots.clear()
                self._asleep = {WEIGHTS, KV_CACHE} if level > 1 else {KV_CACHE}
            case Wake(tag=tag):
                was_away = tag == WEIGHTS and WEIGHTS in self._asleep
                self._asleep.discard(tag)
                return was_away
        return None


def describe(batch: ScheduledBatch) -> str:
    """Return all that a follower gets of a batch."""
    rows = [
        (
            *(row.seq_id, row.slot, row.start, tuple(row.token_ids), tuple(row.block_table)),
            *(row.adapter_slot, row.sample is not None, len(row.verify), len(row.target_ids)),
            row.target_start if row.target_ids else 0,
        )
        for row in batch.sequences
    ]
    copies = (tuple(batch.block_copies), tuple(batch.state_copies))
    return f"{batch.step_id} {rows} {copies} {sorted(batch.adapters.items())}"


@dataclass
class _SimulatedStep(OneStage[StepOutput]):
    model: SimulatedModel
    output: StepOutput
    number: int | None

    def wait(self) -> StepOutput:
        self.model.end_step(self.number)
        return self.output


@dataclass
class SimulatedLoader:
    """Implements ``Loader``, and ``PendingLoad`` of its latest model."""

    rank: int | None
    meeting: Meeting
    record: Record
    model: SimulatedModel | None = None
    num_bytes: int = 0
    num_stages: int = 1

    def begin(self, op: Load, device: Device) -> SimulatedLoader:
        """See ``Loader``."""
        del device
        self.model = SimulatedModel(op.spec, self.rank, self.meeting, self.record)
        return self

    def advance(self) -> None:
        """See ``Pending``."""

    def wait(self) -> SimulatedPlan:
        """See ``Pending``."""
        assert self.model is not None
        return SimulatedPlan(self.model._spec.info)
