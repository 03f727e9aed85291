"""Wires the real parts of an engine from a configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.engine import Engine, StepObserver
from mlx_parallm.engine.interface import ServedModel
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.runner.memory import plan_kv

DEMO_NAME = "mlx-parallm-demo"

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A model that is ready to serve."""

    model: ServedModel
    engine: Engine


def build_engines(
    config: EngineConfig,
    families: MetricFamilies,
    on_progress: Progress,
    *,
    observer: StepObserver | None = None,
) -> list[LoadedEngine]:
    """Load every model and share one byte budget of KV among them, on the calling thread.

    Raises:
        ConfigError: two models have the same name, or the budget is too small.
        ModelLoadError: a model could not be fetched or loaded.
    """
    names = [model_names(model) for model in config.models]
    _check_unique(names)
    loaded = [_load(model, on_progress) for model in config.models]
    plans = [plan_kv(one.weights, config.cache, config.scheduler, one.model) for one in loaded]
    budgets = share_budget([plan.wanted_bytes for plan in plans], _kv_budget(config.cache))
    return [
        _assemble(config, families, names[i], one, plans[i], budgets[i], observer)
        for i, one in enumerate(loaded)
    ]


def share_budget(wanted: Sequence[int], budget: int) -> list[int]:
    """Give each model what it wants, or its proportional share when they want too much together."""
    total = sum(wanted)
    if total <= budget:
        return list(wanted)
    return [want * budget // total for want in wanted]
