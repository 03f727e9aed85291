"""Loads the nets of folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from mlx_parallm.models.nets.plan import NetPlan
from mlx_parallm.types.nets import NetSignature
from mlx_parallm.worker.nets.net_model import DeviceNet
from mlx_parallm.worker.nets.runner import NetRunner
from mlx_parallm.worker.nets.weights import NetWeights
from mlx_parallm.worker.ops import Load, OneStage
from mlx_parallm.worker.worker import Device, PendingLoad


@dataclass(frozen=True, slots=True)
class NetSpec:
    """A net to load.

    Attributes:
        path: the folder.
        plan: its layers.
    """

    path: Path
    plan: NetPlan


class NetLoader:
    """Loads nets. Implements ``Loader``."""

    def begin(self, op: Load, device: Device) -> PendingLoad:
        """Read a net's weights; raise ModelLoadError if they do not suit its layers."""
        del device
        return LoadingNet(op.spec)


class LoadingNet(OneStage[NetSignature]):
    """A net whose weights were read. Implements ``PendingLoad``."""

    def __init__(self, spec: NetSpec) -> None:
        self._weights = NetWeights(spec.path, spec.plan)
        self._plan = spec.plan
        self.num_bytes = self._weights.num_bytes
        self.model: DeviceNet | None = None

    @override
    def wait(self) -> NetSignature:
        """Return the signature; on a CPU, find in which tiles rows are computed."""
        runner = NetRunner(self._plan, self._weights)
        self.model = DeviceNet(runner, self._weights)
        return runner.signature
