"""A generation model on the device: its steps, and the runs of its inputs, as ops of the worker."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from typing_extensions import override

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.types.model_input import HostArray, InputChanges, InputStages
from mlx_parallm.types.step import NO_CHANGES, Runner, ScheduledBatch, StepInFlight
from mlx_parallm.worker.generation.load.plan import GenerationPlan
from mlx_parallm.worker.ops import ComputeInputs, DropInputs, DropTensors, Pending, Step, tensor_ops
from mlx_parallm.worker.worker import Worker


class DeviceRunner(Runner):
    """Runs the steps of one model as ops.

    Attributes:
        info: facts about the loaded model.
        prepares_shapes: see ``GenerationPlan``.
    """

    def __init__(self, worker: Worker, model: str, plan: GenerationPlan) -> None:
        assert plan.info is not None, "the model has no KV pool yet"
        self.info = plan.info
        self.prepares_shapes = plan.prepares_shapes
        self._worker = worker
        self._model = model
        # Runs of inputs that are not complete, by their numbers.
        self._runs: dict[int, Pending[None]] = {}

    @override
    def submit(self, batch: ScheduledBatch) -> StepInFlight:
        if batch.inputs:
            self._change_inputs(batch.inputs)
            batch = replace(batch, inputs=NO_CHANGES)
        return self._worker.begin(Step(model=self._model, batch=batch))

    def _change_inputs(self, changes: InputChanges) -> None:
        if changes.dropped:
            self._worker.execute(DropInputs(model=self._model, slots=changes.dropped))
        for run in changes.abandoned:
            self._runs.pop(run, None)
        for stages in changes.stages:
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
                )
            )
        finally:
            for handle in handles:
                self._worker.execute(DropTensors(model=self._model, handle=handle))


def _host_tensor(array: HostArray) -> HostTensor:
    return HostTensor(np.frombuffer(array.data, array.dtype).reshape(array.shape))
