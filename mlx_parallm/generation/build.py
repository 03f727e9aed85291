"""Loads the generators of a configuration, and shares the KV memory among them."""

from __future__ import annotations

import logging
from collections.abc import Collection

from typing_extensions import override

from mlx_parallm.engine.kind import BuildContext, BuiltModel, KindBuilder, ModelFolder
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.generation.assembly import with_snapshots
from mlx_parallm.generation.kind import GenerationKind
from mlx_parallm.generation.kv_cache.budget import KVShare, report_cut, share_budget
from mlx_parallm.generation.kv_cache.disk.folder import check_kv_folder
from mlx_parallm.generation.kv_memory import kv_budget
from mlx_parallm.generation.metrics import GenerationFamilies
from mlx_parallm.generation.pending import PendingGenerationModel
from mlx_parallm.generation.tokenizers import read_tokenizers
from mlx_parallm.worker.generation.load.loading import GenerationLoader
from mlx_parallm.worker.generation.load.plan import GenerationSpec
from mlx_parallm.worker.training.sessions import TrainingSessions
from mlx_parallm.worker.training.trained_decoder import TrainedDecoder
from mlx_parallm.worker.worker import Worker

logger = logging.getLogger(__name__)


class GenerationBuilder(GenerationKind, KindBuilder):
    """Loads models that continue tokens. It shares out the memory that is left."""

    @override
    def declare(self, families: MetricFamilies) -> None:
        families.of(GenerationFamilies)

    @override
    def install(self, worker: Worker) -> None:
        worker.install(
            GenerationSpec,
            GenerationLoader(
                make_sessions=lambda stock: TrainingSessions(TrainedDecoder(stock)),
                ranks=worker.ranks,
            ),
        )

    def build(self, models: Collection[ModelFolder], context: BuildContext) -> list[BuiltModel]:
        """Load models and share one byte budget of KV among them; see ``KindBuilder``."""
        if context.settings.cache.kv_disk is not None:
            check_kv_folder(context.settings.cache.kv_disk)
        built: list[BuiltModel] = []
        for pending, share in _load_all(models, context):
            logger.info("%s: %s", share.name, share)
            pending.allocate(share)
            built.append(pending.finish())
        return built


def planned(models: Collection[ModelFolder], context: BuildContext) -> list[tuple[KVShare, str]]:
    """Load models on the calling thread; return what KV each would get, and its tokenizer's class.

    Raises as ``KindBuilder.build`` does.
    """
    return [
        (share, pending.read().tokenizers.description)
        for pending, share in _load_all(models, context)
    ]


def _load_all(
    models: Collection[ModelFolder], context: BuildContext
) -> list[tuple[PendingGenerationModel, KVShare]]:
    """Read the weights of models and share the KV memory among them.

    Raises:
        ConfigError: there is not even a block for each, or engines divide the memory and a share
            does not hold the context that was configured.
    """
    pending = [_begun(folder, context) for folder in models]
    loaded = [each.read() for each in pending]
    plans = [each.kv for each in loaded]
    cache = context.settings.cache
    weight_bytes = sum(each.weight_bytes for each in loaded)
    limit = context.settings.memory.limit
    budget = kv_budget(plans, weight_bytes, cache, context.worker, limit)
    blocks = share_budget(plans, budget, cache.num_engines)
    shares = [
        with_snapshots(each, count, cache) for each, count in zip(loaded, blocks, strict=True)
    ]
    for each, share in zip(loaded, shares, strict=True):
        if share.is_cut:
            report_cut(share, each.folder.config.max_model_len, cache.num_engines)
    return list(zip(pending, shares, strict=True))


def _begun(folder: ModelFolder, context: BuildContext) -> PendingGenerationModel:
    """Return a model whose weights are read."""
    text = f"Loading {folder.names[0]}"
    context.on_progress(text, 0.0)
    pending = PendingGenerationModel(folder, read_tokenizers(folder), context)
    pending.read()
    context.on_progress(text, 1.0)
    return pending
