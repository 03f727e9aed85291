"""Loads the models of a configuration: imported only where the engines live."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.build import build_models, loading, sort_by_kind
from mlx_parallm.engine.kind import BuildContext, KindBuilder, TellProgress
from mlx_parallm.engine.local_life import LocalLife, own_worker
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.engine.models import WorkBeside
from mlx_parallm.generation.build import GenerationBuilder, planned
from mlx_parallm.generation.kv_cache.budget import KVShare
from mlx_parallm.nets.build import NetBuilder
from mlx_parallm.pooling.build import PoolingBuilder
from mlx_parallm.serving.kinds import ignore_progress
from mlx_parallm.training.engine import TrainingEngine
from mlx_parallm.training.metrics import TrainingMetrics
from mlx_parallm.worker.device.cpu_process import compute_in_batches
from mlx_parallm.worker.worker import Worker

#: ``BUILDERS``: one for each of ``kinds.KINDS``, in the same order; the one that generates is last.
BUILDERS: tuple[KindBuilder, ...] = (NetBuilder(), PoolingBuilder(), GenerationBuilder())

#: ``build_engines`` loads every model of a configuration on the calling thread.
build_engines = partial(build_models, BUILDERS)


def training_beside(worker: Worker, families: MetricFamilies) -> Sequence[WorkBeside]:
    """Return what runs training sessions beside the models; see ``MakeBeside``."""
    return [TrainingEngine(worker, TrainingMetrics(families))]


def worker_for(config: EngineConfig, families: MetricFamilies) -> AbstractContextManager[Worker]:
    """Return the worker of an engine's process, which may be one rank of several."""
    if config.ranks.size == 1:
        return own_worker(config, families)
    # A process that is alone does not import what several need.
    from mlx_parallm.distributed.leading import leading_worker  # noqa: PLC0415

    return leading_worker(config, families, _generator_folders)


def install_loaders(worker: Worker) -> None:
    """Give a worker the loaders of all kinds of models."""
    for kind in BUILDERS:
        kind.install(worker)


def follow_ranks(config: EngineConfig, install: Callable[[Worker], None] = install_loaders) -> None:
    """Be a rank above 0 until rank 0 says goodbye; see ``distributed.following.follow``."""
    from mlx_parallm.distributed.following import follow  # noqa: PLC0415

    compute_in_batches()
    with loading(config, ignore_progress):
        follow(config, install, _generator_folders)


def _generator_folders(config: EngineConfig) -> dict[str, Path]:
    """Return the folders of the models that generate, by name, fetched where need be."""
    *_, generators = sort_by_kind(BUILDERS, config, ignore_progress)
    return {folder.names[0]: folder.path for folder in generators}


def local_life(config: EngineConfig, on_progress: TellProgress) -> LocalLife:
    """Return engines on a thread of this process; nothing is loaded yet."""
    return LocalLife(config, on_progress, build_engines, training_beside)


def planned_models(config: EngineConfig) -> list[tuple[KVShare, str]]:
    """Load every model on the calling thread; return facts about those that generate.

    They are the KV that each would get, and the class of its tokenizer.

    Raises as ``build_engines`` does.
    """
    worker = Worker()
    install_loaders(worker)
    with loading(config, ignore_progress) as named:
        *others, generators = sort_by_kind(BUILDERS, named, ignore_progress)
        context = BuildContext(named, MetricFamilies(), worker, ignore_progress)
        built = [kind.build(each, context) for kind, each in zip(BUILDERS, others, strict=False)]
        facts = planned(generators, context)
        del built
        return facts
