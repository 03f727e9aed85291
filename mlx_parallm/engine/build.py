"""Wires the real parts of an engine from a configuration."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlx_parallm.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from mlx_parallm.engine.engine import Engine
from mlx_parallm.engine.interface import ServedModel
from mlx_parallm.engine.metrics import EngineMetrics, MetricFamilies
from mlx_parallm.errors import ConfigError
from mlx_parallm.kv_cache.manager import KVCacheManager
from mlx_parallm.runner.backend_choice import BackendChoice, choose_backend
from mlx_parallm.runner.cache_layout import CacheLayout, kv_shapes, probe_layout
from mlx_parallm.runner.device import backend_name, free_memory_bytes
from mlx_parallm.runner.host_memory import keep_freed_memory
from mlx_parallm.runner.hub import resolve_model
from mlx_parallm.runner.loader import LoadedModel, load_model
from mlx_parallm.runner.memory import KVPlan, plan_kv, query_heads
from mlx_parallm.runner.model_runner import ModelRunner
from mlx_parallm.scheduler.scheduler import Scheduler
from mlx_parallm.tokenizer.tokenizer import ParallmTokenizer, load_tokenizer
from mlx_parallm.tracing import StepTracer

DEMO_NAME = "mlx-parallm-demo"
# Found by its place in the package: the engine does not depend on the code that made it.
DEMO_FOLDER = Path(__file__).resolve().parent.parent / "demo" / "model"

# A step of so many tokens keeps an NVIDIA GPU busy; elsewhere it would take too long.
CUDA_TOKEN_BUDGET = 2048
# KV of small models on the CPU; larger ones get as much as their weights take.
CPU_KV_BYTES = 1 << 30

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A model that is ready to serve."""

    model: ServedModel
    engine: Engine


@dataclass(frozen=True, slots=True)
class _Weights:
    """A model in memory, before it has any KV."""

    config: ModelConfig
    loaded: LoadedModel
    layouts: tuple[CacheLayout, ...]
    tokenizer: ParallmTokenizer
    attention: BackendChoice
    plan: KVPlan


def build_engines(
    config: EngineConfig,
    families: MetricFamilies,
    on_progress: Progress,
    *,
    tracer: StepTracer | None = None,
) -> list[LoadedEngine]:
    """Load every model and share one byte budget of KV among them, on the calling thread.

    ``tracer`` is told what every step does.

    Raises:
        ConfigError: two models have the same name, or the budget is too small.
        ModelLoadError: a model could not be fetched or loaded.
    """
    check_names(config.models)
    keep_freed_memory()
    models = [_load(model, config, on_progress) for model in config.models]
    wanted = [one.plan.wanted_bytes for one in models]
    weights = sum(one.loaded.weight_bytes for one in models)
    budgets = share_budget(wanted, _kv_budget(config.cache, sum(wanted), weights))
    return [
        _assemble(one, budget, config, families, tracer)
        for one, budget in zip(models, budgets, strict=True)
    ]


def model_names(model: ModelConfig) -> tuple[str, ...]:
    """The names clients may use for a model; the first is the one reported."""
    return model.served_names or (model.path or DEMO_NAME,)


def check_names(models: Sequence[ModelConfig]) -> None:
    """Raise ConfigError if two models share a name."""
    names = Counter(name for model in models for name in set(model_names(model)))
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise ConfigError(f"Several models are named {twice[0]!r}; use --served-model-name.")


def share_budget(wanted: Sequence[int], budget: int) -> list[int]:
    """Give each model what it wants, or its proportional share when they want too much together."""
    total = sum(wanted)
    if total <= budget:
        return list(wanted)
    return [want * budget // total for want in wanted]


def with_token_budget(config: SchedulerConfig, backend: str) -> SchedulerConfig:
    """The limits with this backend's token budget where none is given."""
    if config.max_num_batched_tokens is not None or backend != "cuda":
        return config
    return replace(config, max_num_batched_tokens=CUDA_TOKEN_BUDGET)


def _kv_budget(cache: CacheConfig, wanted: int, weights: int) -> int:
    """Bytes of KV for all models: as configured, or by what is free and what is sensible."""
    if cache.kv_cache_bytes is not None:
        return cache.kv_cache_bytes
    free = free_memory_bytes()
    budget = wanted if free is None else int(free * cache.memory_fraction)
    if backend_name() == "cpu":
        # There a pool takes its memory, and the time to fill it, at start.
        budget = min(budget, max(CPU_KV_BYTES, weights))
    return budget


def _load(model: ModelConfig, config: EngineConfig, on_progress: Progress) -> _Weights:
    name = model_names(model)[0]
    path = DEMO_FOLDER if model.path is None else _fetch(model, model.path, on_progress)
    on_progress(f"Loading {name}", 0.0)
    loaded = load_model(model, path)
    layouts = probe_layout(loaded.model)
    tokenizer = load_tokenizer(
        path, chat_template=model.chat_template, trust_remote_code=model.trust_remote_code
    )
    attention = choose_backend(config.cache, kv_shapes(layouts), query_heads(loaded.config))
    plan = plan_kv(
        layouts,
        loaded.config,
        config.cache,
        config.scheduler,
        model.max_model_len,
        attention.backend,
    )
    on_progress(f"Loading {name}", 1.0)
    return _Weights(model, loaded, layouts, tokenizer, attention, plan)


def _fetch(model: ModelConfig, source: str, on_progress: Progress) -> Path:
    return resolve_model(
        source,
        model.revision,
        on_progress=on_progress,
        trust_remote_code=model.trust_remote_code,
    )


def _assemble(
    one: _Weights,
    budget: int,
    config: EngineConfig,
    families: MetricFamilies,
    tracer: StepTracer | None,
) -> LoadedEngine:
    num_blocks = one.plan.num_blocks(budget)
    runner = ModelRunner(
        one.loaded, one.layouts, one.plan, num_blocks, one.attention.backend, tracer=tracer
    )
    info = runner.info
    kv = KVCacheManager(
        info.num_blocks,
        info.block_size,
        enable_prefix_caching=config.cache.enable_prefix_caching and not info.has_state,
    )
    scheduler = Scheduler(
        with_token_budget(config.scheduler, backend_name()),
        kv,
        max_model_len=info.max_model_len,
        has_state=info.has_state,
    )
    names = model_names(one.config)
    metrics = EngineMetrics(families, names[0], info)
    engine = Engine(scheduler, runner, one.tokenizer, metrics, seed=config.seed, tracer=tracer)
    model = ServedModel(
        names=names,
        root=one.config.path or DEMO_NAME,
        created=int(time.time()),
        tokenizer=one.tokenizer,
        info=info,
    )
    return LoadedEngine(model, engine)
