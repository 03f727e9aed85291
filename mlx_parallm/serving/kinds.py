"""The kinds of models that are served: a new kind is a package, and a line here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.build import build_models, loading, sort_by_kind
from mlx_parallm.engine.interface import BuildContext, Kind
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.generation.build import GenerationKind, kv_shares
from mlx_parallm.generation.engine import GenerationEngine
from mlx_parallm.generation.kv_cache.budget import KVShare
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.pooling.build import PoolingKind
from mlx_parallm.pooling.engine import PoolingEngine
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.tracing import StepTracer
from mlx_parallm.worker.worker import Worker

#: The first kind that serves a folder's model loads it. Models that generate come last: they take
#: every folder, and share out the memory that is left.
KINDS: tuple[Kind, ...] = (PoolingKind(), GenerationKind())


#: ``build_engines`` loads every model of a configuration on the calling thread.
build_engines = partial(build_models, KINDS)


def ignore_progress(_text: str, _share: float) -> None:
    """Report nothing."""


@dataclass(frozen=True, slots=True)
class LoadedGenerator:
    """A model that generates, ready to be stepped on the thread that loaded it."""

    model: GenerationModel
    engine: GenerationEngine


@dataclass(frozen=True, slots=True)
class LoadedPooling:
    """A pooling model, ready to be stepped on the thread that loaded it."""

    model: PoolingModel
    engine: PoolingEngine
    worker: Worker


def build_model(
    config: EngineConfig, families: MetricFamilies, *, tracer: StepTracer | None = None
) -> LoadedGenerator | LoadedPooling:
    """Load the only model of a configuration; raise as ``build_engines`` does."""
    worker = Worker(tracer)
    (built,) = build_engines(config, families, worker, ignore_progress, tracer=tracer)
    engine: Any = built.engine
    if isinstance(built.model, GenerationModel):
        return LoadedGenerator(built.model, engine)
    return LoadedPooling(cast("PoolingModel", built.model), engine, worker)


def planned_kv(config: EngineConfig) -> list[KVShare]:
    """Load every model and return what KV each that generates would get, on the calling thread.

    Raises as ``build_engines`` does.
    """
    worker = Worker()
    for kind in KINDS:
        kind.install(worker)
    with loading(config, ignore_progress) as named:
        others, generation = sort_by_kind(KINDS, named, ignore_progress)
        context = BuildContext(named, MetricFamilies(), worker, ignore_progress)
        pooling = PoolingKind().build(others, context)
        shares = kv_shares(generation, context)
        del pooling
        return shares
