"""Loads every model of a configuration, each by its kind."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge

from mlx_parallm.config import CacheConfig, EngineConfig, ModelConfig
from mlx_parallm.confinement import GGUF
from mlx_parallm.demo_models.folders import DEMO_NAME
from mlx_parallm.engine.kind import (
    BuildContext,
    BuiltModel,
    KindBuilder,
    MemoryLimit,
    ModelFolder,
    TellProgress,
)
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.engine.model_files import kind_of, model_folder
from mlx_parallm.kernels.device_precompiler import device_precompiler
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.types.step import StepTracer
from mlx_parallm.units import readable_bytes
from mlx_parallm.worker.device.allocator import limit_allocator
from mlx_parallm.worker.device.cpu_process import keep_freed_memory
from mlx_parallm.worker.device.kernels import kernels_kept_in
from mlx_parallm.worker.device.memory_limits import host_free_bytes
from mlx_parallm.worker.device.properties import (
    active_memory_bytes,
    backend_name,
    cache_memory_bytes,
    free_memory_bytes,
    log_blas,
)
from mlx_parallm.worker.worker import Worker

# MEMORY_GAUGES: the names, descriptions and sources of the metrics of MLX's memory.
MEMORY_GAUGES: tuple[tuple[str, str, Callable[[], int]], ...] = (
    (
        "mlx_parallm:active_memory_bytes",
        "Memory of the arrays that MLX holds, in the engine's process.",
        active_memory_bytes,
    ),
    (
        "mlx_parallm:mlx_cache_memory_bytes",
        "Memory of freed arrays that MLX keeps for new ones, in the engine's process.",
        cache_memory_bytes,
    ),
)


def build_models(
    kinds: Sequence[KindBuilder],
    config: EngineConfig,
    families: MetricFamilies,
    worker: Worker,
    on_progress: TellProgress,
    *,
    tracer: StepTracer | None = None,
) -> list[BuiltModel]:
    """Load every model on the calling thread, one kind after the other.

    Args:
        kinds: the first that serves a folder loads it; those that share out the memory that is
            left come last.
        config: names the models.
        families: of metrics.
        worker: is to have the models.
        on_progress: is notified of the load's progress.
        tracer: records every step; None if none does.

    Raises:
        ConfigError: two models have the same name, or the memory is too small.
        ModelLoadError: a model could not be fetched or loaded.
    """
    families.of(_declare_memory)
    for kind in kinds:
        kind.declare(families)
        kind.install(worker)
    with loading(config, on_progress) as named:
        context = BuildContext(named, families, worker, on_progress, tracer)
        by_kind = sort_by_kind(kinds, named, on_progress)
        return [
            built
            for kind, folders in zip(kinds, by_kind, strict=True)
            for built in _build(kind, folders, context)
        ]


def _declare_memory(registry: CollectorRegistry) -> None:
    """Declare the memory that MLX holds, which is read at each scrape."""
    for name, text, read in MEMORY_GAUGES:
        Gauge(name, text, registry=registry).set_function(read)


def memory_limit(config: EngineConfig, built: Sequence[BuiltModel], worker: Worker) -> int | None:
    """Return the most bytes that models may take on a device; None if it is not known.

    It is that of ``--memory``. Without one it is what the models take that were loaded at the
    start, or what they could have taken: their weights and the share of the rest that is for KV.
    """
    memory = [each.model.memory for each in built if each.engine is not None]
    weights, kv = sum(each.weights for each in memory), sum(each.kv for each in memory)
    worker.give_back()
    free = worker.least_free(free_memory_bytes(config.memory.num_engines))
    limit = config.memory.limit
    if limit is not None:
        return limit.num_bytes(None if free is None else weights + kv + free)
    return (
        None if free is None else weights + max(kv, int((kv + free) * config.cache.memory_fraction))
    )


def _build(
    kind: KindBuilder, folders: Sequence[ModelFolder], context: BuildContext
) -> list[BuiltModel]:
    """Load the models of a kind; the first are evicted if all take more than its limit."""
    limit = kind.memory_limit(context.settings)
    if limit is None:
        return kind.build(folders, context)
    built: list[BuiltModel] = []
    for folder in folders:
        built += kind.build([folder], context)
        built = evict_beyond(built, limit)
    return built


def evict_beyond(models: Sequence[BuiltModel], limit: MemoryLimit) -> list[BuiltModel]:
    """Return a kind's models, of which the first are evicted if all take more than the limit.

    Raises:
        ConfigError: the last one takes more alone.
    """
    free = limit.num_bytes
    kept: list[BuiltModel] = []
    for built in reversed(models):
        free -= 0 if built.engine is None else built.model.memory.weights
        if free < 0 and not kept:
            raise ConfigError(
                f"{built.model.names[0]} takes {built.model.memory.weights} bytes, and "
                f"{limit.flag} is {limit.num_bytes}."
            )
        if free < 0 and built.engine is not None:
            built.engine.release()
        kept.append(built if free >= 0 else replace(built, engine=None))
    return kept[::-1]


@contextlib.contextmanager
def loading(config: EngineConfig, on_progress: TellProgress) -> Generator[EngineConfig]:
    """Prepare the process to load models; yield the configuration with all their names.

    Raises:
        ConfigError: two models have the same name, or memory cannot be used as configured.
    """
    check_names(config.models)
    log_blas()
    keep_freed_memory()
    limit_allocator(config.memory)
    check_host_blocks(config.cache, backend_name(), host_free_bytes())
    with kernels_kept_in(device_precompiler(), config.kernel_cache_dir, on_progress):
        yield replace(config, models=with_short_names(config.models))


def check_host_blocks(cache: CacheConfig, backend: str, free_bytes: int | None) -> None:
    """Raise ConfigError if host memory cannot keep evicted KV as configured.

    Args:
        cache: the settings.
        backend: as ``backend_name`` returns it.
        free_bytes: free host memory; None if unknown.
    """
    size = cache.kv_host_bytes
    if size and backend != "cuda":
        raise ConfigError(
            "--kv-host-bytes needs a GPU with memory of its own: here KV is in host memory "
            "already, and --kv-cache-memory-bytes gives it more."
        )
    if free_bytes is not None and size > free_bytes:
        raise ConfigError(
            f"--kv-host-bytes is {readable_bytes(size)}; only {readable_bytes(free_bytes)} of host "
            "memory are free."
        )


def sort_by_kind(
    kinds: Sequence[KindBuilder], config: EngineConfig, on_progress: TellProgress
) -> list[list[ModelFolder]]:
    """Fetch every model; return those of each kind, in the order they were given."""
    folders = [_folder(model, on_progress) for model in config.models]
    by_kind: list[list[ModelFolder]] = [[] for _ in kinds]
    for folder in folders:
        by_kind[kinds.index(kind_of(kinds, folder.config, folder.path))].append(folder)
    return by_kind


def model_names(model: ModelConfig) -> tuple[str, ...]:
    """Return the names that clients may use for a model; the first is the one reported."""
    return model.served_names or (model.path or DEMO_NAME,)


def check_names(models: Sequence[ModelConfig]) -> None:
    """Raise ConfigError if two models share a name."""
    names = Counter(name for model in models for name in set(model_names(model)))
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise ConfigError(f"Several models are named {twice[0]!r}; use --served-model-name.")


def with_short_names(models: Sequence[ModelConfig]) -> tuple[ModelConfig, ...]:
    """Return the models, those in folders with the last part of the path as another name.

    A model that was given names has only those. A short name that is a name of another model, or
    that two folders would have, is left out.
    """
    full = {name for model in models for name in model_names(model)}
    shorts = [_short_name(model) for model in models]
    counts = Counter(shorts)
    return tuple(
        replace(model, served_names=(*model_names(model), short))
        if short and counts[short] == 1 and short not in full
        else model
        for model, short in zip(models, shorts, strict=True)
    )


def _short_name(model: ModelConfig) -> str:
    """Return the name of a model's folder or file; "" if it has neither, or was given names."""
    if model.path is None or model.served_names:
        return ""
    folder = Path(model.path).expanduser()
    if folder.is_file():
        return folder.name.removesuffix(GGUF)
    return folder.resolve().name if folder.is_dir() else ""


def _folder(model: ModelConfig, on_progress: TellProgress) -> ModelFolder:
    path = model_folder(model, on_progress)
    return ModelFolder(replace(model, served_names=model_names(model)), path)
