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
    (built,) = build_engines(config, families, Worker(tracer), on_progress, tracer=tracer)
    if built.model.traits != GENERATION_TRAITS:
        raise ConfigError(f"{built.model.names[0]} is an encoder: it generates nothing.")
    model, engine = cast("GenerationModel", built.model), cast("GenerationEngine", built.engine)
    return LoadedGenerator(model, engine)


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
