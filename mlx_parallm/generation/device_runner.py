"""A generation model on the device: its steps, and the moves before them, as ops of the worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from typing_extensions import override

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.engine.device import DeviceAdapters
from mlx_parallm.types.content import Buffer
from mlx_parallm.types.model_input import HostArray, InputStages
from mlx_parallm.types.step import (
    NO_MOVES,
    PIECE_BLOCKS,
    PIECE_STATES,
    Moves,
    Runner,
    ScheduledBatch,
    StepInFlight,
    StepOutput,
)
from mlx_parallm.worker.device.room import give_back
from mlx_parallm.worker.generation.load.plan import GenerationPlan
from mlx_parallm.worker.ops import (
    ComputeInputs,
    Done,
    DropInputs,
    DropTensors,
    Pending,
    ReadBlocks,
    ReadStates,
    Step,
    Unload,
    WriteBlocks,
    WriteStates,
    tensor_ops,
)
from mlx_parallm.worker.worker import Worker

T = TypeVar("T")


class DeviceRunner(Runner):
    """Runs the steps of one model as ops.

    Attributes:
        info: facts about the loaded model.
        prepares_shapes: see ``GenerationPlan``.
    """

    def __init__(
        self,
        worker: Worker,
        model: str,
        plan: GenerationPlan,
        adapters: DeviceAdapters | None = None,
        *,
        submits_beside: bool = False,
    ) -> None:
        """Run a model that ``worker`` has.

        Args:
            worker: runs the ops.
            model: its name there.
            plan: the complete plan of its load.
            adapters: the tensors of its adapters, which a new load of the model does not have;
                None if its steps name only those that it has.
            submits_beside: see ``Runner``.
        """
        assert plan.info is not None, "the model has no KV pool yet"
        self._adapters = adapters
        self.info = plan.info
        self.submits_beside = submits_beside
        self.prepares_shapes = plan.prepares_shapes
        self._worker = worker
        self._model = model
        # Runs of inputs that are not complete, by their numbers.
        self._runs: dict[int, Pending[None]] = {}

    @override
    def submit(self, batch: ScheduledBatch) -> StepInFlight:
        if self._adapters is not None:
            self._adapters.ensure(batch.adapters.values())
        if batch.moves:
            return self._submit_after(batch.moves, replace(batch, moves=NO_MOVES))
        return self._worker.begin(Step(model=self._model, batch=batch))

    @override
    def release(self) -> None:
        self._runs.clear()
        self._worker.execute(Unload(model=self._model))
        if self._adapters is not None:
            self._adapters.release()
        give_back()

    def _submit_after(self, moves: Moves, batch: ScheduledBatch) -> StepInFlight:
        """Begin the moves, then the step if the batch has sequences."""
        # What is saved may be filled, or the step may write it.
        reads = [self._worker.begin(op) for op in self._reads(moves)]
        writes = [self._worker.begin(op) for op in self._writes(moves)]
        self._change_inputs(moves)
        step: StepInFlight = (
            self._worker.begin(Step(model=self._model, batch=batch))
            if batch.sequences
            else Done(StepOutput(tokens=()))
        )
        if not reads and not writes:
            return step
        contents = [content for _, content in moves.saved + moves.saved_states]
        return _StepAfterMoves(step, reads, writes, contents)

    def _reads(self, moves: Moves) -> Iterator[ReadBlocks | ReadStates]:
        for blocks, _ in _pieces(moves.saved, PIECE_BLOCKS):
            yield ReadBlocks(model=self._model, blocks=blocks)
        for slots, _ in _pieces(moves.saved_states, PIECE_STATES):
            yield ReadStates(model=self._model, slots=slots)

    def _writes(self, moves: Moves) -> Iterator[WriteBlocks | WriteStates]:
        for blocks, data in _pieces(moves.filled, PIECE_BLOCKS):
            yield WriteBlocks(model=self._model, blocks=blocks, data=data)
        for slots, data in _pieces(moves.filled_states, PIECE_STATES):
            yield WriteStates(model=self._model, slots=slots, data=data)

    def _change_inputs(self, moves: Moves) -> None:
        if moves.dropped:
            self._worker.execute(DropInputs(model=self._model, slots=moves.dropped))
        for run in moves.abandoned:
            self._runs.pop(run, None)
        for stages in moves.stages:
            run = self._begin_inputs(stages) if stages.begun else self._runs.pop(stages.run)
            for _ in range(min(stages.num_stages, run.num_stages - 1)):
                run.advance()
            if stages.is_last:
                run.wait()
            else:
                self._runs[stages.run] = run

    def _begin_inputs(self, stages: InputStages) -> Pending[None]:
        handles = tuple(f"{self._model} input {slot}" for slot in stages.slots)
        try:
            for handle, source in zip(handles, stages.begun, strict=True):
                arrays = {name: _host_tensor(array) for name, array in source.arrays.items()}
                for op in tensor_ops(self._model, handle, arrays):
                    self._worker.execute(op)
            return self._worker.begin(
                ComputeInputs(
                    model=self._model,
                    slots=stages.slots,
                    kind=stages.begun[0].kind,
                    handles=handles,
                    places=stages.places,
                )
            )
        finally:
            for handle in handles:
                self._worker.execute(DropTensors(model=self._model, handle=handle))


@dataclass(frozen=True, slots=True)
class _StepAfterMoves(StepInFlight):
    """A step, and the moves of blocks and states that were begun before it.

    Attributes:
        step: the step.
        reads: what is saved.
        writes: what is filled.
        contents: the contents of what is saved.
    """

    step: StepInFlight
    reads: Sequence[Pending[tuple[Buffer, ...]]]
    writes: Sequence[Pending[None]]
    contents: Sequence[bytes]

    @override
    def wait(self) -> StepOutput:
        """Raise if the step or a move has failed: then nothing of the batch is as it should be."""
        output = self.step.wait()
        for write in self.writes:
            write.wait()
        data = [row for read in self.reads for row in read.wait()]
        return replace(output, saved=tuple(zip(self.contents, data, strict=True)))


def _pieces(
    pairs: Sequence[tuple[int, T]], most: int
) -> Iterator[tuple[tuple[int, ...], tuple[T, ...]]]:
    """Yield blocks or slots and what belongs to them, at most so many at a time."""
    for first in range(0, len(pairs), most):
        places, others = zip(*pairs[first : first + most], strict=True)
        yield places, others


def _host_tensor(array: HostArray) -> HostTensor:
    return HostTensor(np.frombuffer(array.data, array.dtype).reshape(array.shape))
