"""Builds the engines of nets."""

from __future__ import annotations

from collections.abc import Collection

from typing_extensions import override

from mlx_parallm.engine.kind import BuildContext, BuiltModel, KindBuilder, ModelFolder
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.nets.kind import NetKind
from mlx_parallm.nets.metrics import NetFamilies
from mlx_parallm.worker.nets.loading import NetLoader, NetSpec
from mlx_parallm.worker.worker import Worker


class NetBuilder(NetKind, KindBuilder):
    """Loads nets."""

    @override
    def declare(self, families: MetricFamilies) -> None:
        families.of(NetFamilies)

    @override
    def install(self, worker: Worker) -> None:
        worker.install(NetSpec, NetLoader())

    @override
    def build(self, models: Collection[ModelFolder], context: BuildContext) -> list[BuiltModel]:
        built: list[BuiltModel] = []
        for folder in models:
            opens = self.read(folder.config, folder.path, context.settings)
            built.append(opens(context.families, context.worker).finish())
        return built
