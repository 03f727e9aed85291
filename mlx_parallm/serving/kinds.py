"""The kinds of models that are served: a new kind is a package, and a line here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.build import build_models, loading, sort_by_kind
from mlx_parallm.engine.interface import BuildContext, BuiltModel, Kind, TellProgress
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.generation.build import GenerationKind, kv_shares
from mlx_parallm.generation.engine import GenerationEngine
from mlx_parallm.generation.kv_cache.budget import KVShare
from mlx_parallm.generation.model import GENERATION_TRAITS, GenerationModel
from mlx_parallm.pooling.build import PoolingKind
from mlx_parallm.pooling.engine import PoolingEngine
from mlx_parallm.pooling.model import POOLING_TRAITS, PoolingModel
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.types.tracing import StepTracer
from mlx_parallm.worker.worker import Worker

#: The first kind that serves a folder's model loads it. Models that generate come last: they take
#: every folder, and share out the memory that is left.
KINDS: tuple[Kind, ...] = (PoolingKind(), GenerationKind())


def device_worker(tracer: StepTracer | None = None) -> Worker:
    """Return a worker that can load every kind of model; ``tracer`` is told what steps do."""
    worker = Worker(tracer)
    for kind in KINDS:
        kind.install(worker)
    return worker


def build_engines(
    config: EngineConfig,
    families: MetricFamilies,
    worker: Worker,
    on_progress: TellProgress,
    *,
    tracer: StepTracer | None = None,
) -> list[BuiltModel]:
    """Load every model of a configuration on the calling thread; see ``build_models``."""
    return build_models(KINDS, config, families, worker, on_progress, tracer=tracer)


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


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model of any kind, ready to be stepped on the thread that loaded it."""

    built: BuiltModel
    worker: Worker

    @property
    def generator(self) -> LoadedGenerator | None:
        """Return it as a model that generates; None if it does not."""
        if self.built.model.traits != GENERATION_TRAITS:
            return None
        model = cast("GenerationModel", self.built.model)
        return LoadedGenerator(model, cast("GenerationEngine", self.built.engine))

    @property
    def pooling(self) -> LoadedPooling | None:
        """Return it as a pooling model; None if it is none."""
        if self.built.model.traits != POOLING_TRAITS:
            return None
        model = cast("PoolingModel", self.built.model)
        return LoadedPooling(model, cast("PoolingEngine", self.built.engine), self.worker)


def build_model(
    config: EngineConfig,
    families: MetricFamilies,
    on_progress: TellProgress,
    *,
    tracer: StepTracer | None = None,
) -> LoadedModel:
    """Load the only model of a configuration; raise as ``build_engines`` does."""
    worker = Worker(tracer)
    (built,) = build_engines(config, families, worker, on_progress, tracer=tracer)
    return LoadedModel(built, worker)


def build_generator(
    config: EngineConfig,
    families: MetricFamilies,
    on_progress: TellProgress,
    *,
    tracer: StepTracer | None = None,
) -> LoadedGenerator:
    """Load the only model of a configuration, which must generate.

    Raises:
        ConfigError: it generates nothing; and as ``build_engines`` does.
    """
    loaded = build_model(config, families, on_progress, tracer=tracer)
    if loaded.generator is None:
        raise ConfigError(f"{loaded.built.model.names[0]} is an encoder: it generates nothing.")
    return loaded.generator


def planned_kv(config: EngineConfig) -> list[KVShare]:
    """Load every model and return what KV each that generates would get, on the calling thread.

    Raises as ``build_engines`` does.
    """

    def ignore(text: str, share: float) -> None:
        """Show no progress."""

    with loading(config, ignore) as named:
        others, generation = sort_by_kind(KINDS, named, ignore)
        context = BuildContext(named, MetricFamilies(), device_worker(), ignore)
        pooling = PoolingKind().build(others, context)
        shares = kv_shares(generation, context)
        del pooling
        return shares
