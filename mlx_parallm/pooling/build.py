"""Builds the engines of pooling models."""

from __future__ import annotations

from collections.abc import Collection

from mlx_parallm.engine.kind import BuildContext, BuiltModel, KindBuilder, ModelFolder
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.models.load_failures import load_failures
from mlx_parallm.pooling.kind import PoolingKind
from mlx_parallm.pooling.metrics import PoolingFamilies
from mlx_parallm.worker.pooling.loading import PoolingLoader
from mlx_parallm.worker.pooling.plan import PoolingSpec
from mlx_parallm.worker.training.sessions import TrainingSessions
from mlx_parallm.worker.worker import Worker


class PoolingBuilder(PoolingKind, KindBuilder):
    """Loads pooling models."""

    def declare(self, families: MetricFamilies) -> None:
        """See ``KindBuilder``."""
        families.of(PoolingFamilies)

    def install(self, worker: Worker) -> None:
        """See ``KindBuilder``."""
        worker.install(PoolingSpec, PoolingLoader(TrainingSessions))

    def build(self, models: Collection[ModelFolder], context: BuildContext) -> list[BuiltModel]:
        """See ``KindBuilder``."""
        built: list[BuiltModel] = []
        for folder in models:
            text = f"Loading {folder.names[0]}"
            context.on_progress(text, 0.0)
            with load_failures(folder.path):
                opens = self.read(folder.config, folder.path, context.settings)
            built.append(opens(context.families, context.worker).finish())
            context.on_progress(text, 1.0)
        return built
