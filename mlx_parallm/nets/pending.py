"""Loads one net on the engine thread. Nets are small, so this takes one part."""

from __future__ import annotations

import time
from typing import Any

from mlx_parallm.engine.device import DeviceWeights
from mlx_parallm.engine.kind import BuiltModel, ModelFolder
from mlx_parallm.engine.live_weights import LiveWeights
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.engine.policies import Policies
from mlx_parallm.models.load_failures import load_failures
from mlx_parallm.models.nets.plan import NetPlan
from mlx_parallm.nets.engine import MAX_ROWS, NetEngine
from mlx_parallm.nets.metrics import NetMetrics
from mlx_parallm.nets.model import NetModel
from mlx_parallm.types.nets import NetSignature
from mlx_parallm.worker.nets.loading import NetSpec
from mlx_parallm.worker.ops import Load
from mlx_parallm.worker.worker import PendingLoad, Worker


class PendingNet:
    """A net that is being loaded. Implements ``PendingModel``.

    Attributes:
        num_bytes: size of its weights.
    """

    def __init__(
        self, folder: ModelFolder, plan: NetPlan, families: MetricFamilies, worker: Worker
    ) -> None:
        """Begin to load a folder with this plan.

        Raises:
            ModelLoadError: its weights are missing, or do not suit the plan.
        """
        self._folder = folder
        self._families = families
        self._worker = worker
        with load_failures(folder.path):
            opened: Any = worker.begin(Load(model=self.name, spec=NetSpec(folder.path, plan)))
        self._pending: PendingLoad | None = opened
        self.num_bytes: int = opened.num_bytes

    @property
    def name(self) -> str:
        """Return the first of its names."""
        return self._folder.names[0]

    def advance(self) -> float:
        """See ``PendingModel``."""
        return 1.0

    def close(self) -> None:
        """Drop the load, unless it was finished."""
        self._pending = None

    def finish(self, kept: Policies | None = None) -> BuiltModel:
        """Return the net, ready to serve; see ``PendingModel``."""
        assert self._pending is not None, "closed"
        with load_failures(self._folder.path):
            signature: NetSignature = self._pending.wait()
        model = NetModel(
            names=self._folder.names,
            root=self._folder.config.path or str(self._folder.path),
            created=int(time.time()),
            signature=signature,
            weight_bytes=self.num_bytes,
            max_rows=MAX_ROWS,
        )
        policies = kept or Policies(model=self.name)
        engine = NetEngine(
            self._worker,
            self.name,
            signature,
            policies=policies,
            metrics=NetMetrics(self._families, self.name),
        )
        engine.live = LiveWeights(policies, DeviceWeights(self._worker, self.name), engine)
        return BuiltModel(self._folder.config, model, engine)
