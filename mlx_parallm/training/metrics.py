"""Prometheus metrics of the forwards of training sessions, which the engine thread writes."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.types.gradients import GradientResult
from mlx_parallm.types.training import PairResult


class TrainingFamilies:
    """The metric families of all sessions together."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.forwards = Counter(
            "mlx_parallm:mezo_forwards",
            "Forwards of sessions, with their gradients.",
            registry=registry,
        )
        self.seconds = Counter(
            "mlx_parallm:mezo_forward_seconds", "Time of these forwards.", registry=registry
        )
        self.lookups = Counter(
            "mlx_parallm:mezo_prefix_lookups",
            "Texts whose states before the lowest trained layer were looked up.",
            registry=registry,
        )
        self.hits = Counter(
            "mlx_parallm:mezo_prefix_hits", "Those that were kept.", registry=registry
        )


class TrainingMetrics:
    """Writes the metrics. Times are in seconds."""

    def __init__(self, families: MetricFamilies) -> None:
        self._families = families.of(TrainingFamilies)

    def on_forward(self, result: PairResult | GradientResult, seconds: float) -> None:
        """Count a forward."""
        self._families.forwards.inc()
        self._families.seconds.inc(seconds)
        self._families.lookups.inc(result.lookups)
        self._families.hits.inc(result.hits)
