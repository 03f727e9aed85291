"""Builds the engines of pooling models."""

from __future__ import annotations

from collections.abc import Collection

from typing_extensions import override

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

    @override
    def declare(self, families: MetricFamilies) -> None:
        families.of(PoolingFamilies)

    @override
    def install(self, worker: Worker) -> None:
        worker.install(PoolingSpec, PoolingLoader(TrainingSessions))

    @override
    def build(self, models: Collection[ModelFolder], context: BuildContext) -> list[BuiltModel]:
        built: list[BuiltModel] = []
        for folder in models:
            text = f"Loading {folder.names[0]}"
            context.on_progress(text, 0.0)
            with load_failures(folder.path):
                opens = self.read(folder.config, folder.path, context.settings)
            built.append(opens(context.families, context.worker).finish())
            context.on_progress(text, 1.0)
        return built
