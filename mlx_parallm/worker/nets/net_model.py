"""A loaded net, as the worker calls it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from mlx_parallm.types.request import WEIGHTS
from mlx_parallm.worker.nets.runner import NetRunner
from mlx_parallm.worker.nets.weights import NetWeights
from mlx_parallm.worker.ops import (
    Checksums,
    CommitWeights,
    Done,
    DropPrepared,
    NetBatch,
    Op,
    Pending,
    PrepareWeights,
    Sleep,
    Wake,
)
from mlx_parallm.worker.weights.preparing import prepare
from mlx_parallm.worker.worker import Tensors, WorkerModel


class DeviceNet(WorkerModel):
    """Runs batches of a net and changes its weights."""

    def __init__(self, runner: NetRunner, weights: NetWeights) -> None:
        self._runner = runner
        self._weights = weights

    @override
    def begin(self, op: Op[Any], tensors: Mapping[str, Tensors]) -> Pending[Any]:
        return Done(self._apply(op, tensors))

    def _apply(self, op: Op[Any], tensors: Mapping[str, Tensors]) -> Any:
        weights = self._weights
        match op:
            case NetBatch():
                return self._runner.run(op)
            case PrepareWeights():
                return prepare(weights, op, tensors)
            case CommitWeights():
                return weights.commit()
            case DropPrepared():
                return weights.drop_prepared()
            case Checksums():
                return weights.checksums()
            case Sleep(level=level):
                return weights.offload(keeps=level == 1)
            case Wake(tag=tag):
                return tag == WEIGHTS and weights.fetch()
            case _:
                raise AssertionError(f"nets do not know {op}")

    @override
    def recover(self) -> None:
        """See ``WorkerModel``: a forward is complete when it returns."""

    @override
    def release(self) -> None:
        """See ``WorkerModel``: arrays are freed with this object."""
