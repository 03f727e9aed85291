"""Prometheus metrics of the training sessions of a server, which its event loop writes."""

from __future__ import annotations

from collections import Counter as CountOf
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from mlx_parallm.training.records import Status, StepRecord

#: ``COUNTERS``: the counter of each field of a step's record that is added up, and its help.
COUNTERS = (
    (
        "layer_tokens",
        "mlx_parallm:mezo_layer_tokens",
        "Tokens computed in steps, times their layers.",
    ),
    (
        "naive_layer_tokens",
        "mlx_parallm:mezo_naive_layer_tokens",
        "The same with a forward of all layers for each perturbed copy.",
    ),
    ("seconds", "mlx_parallm:mezo_step_seconds", "Time from a step's request to its losses."),
)


class SessionMetrics:
    """The metrics of the sessions and their steps, in a registry of their own."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._sessions = Gauge(
            "mlx_parallm:mezo_sessions",
            "Training sessions by their status.",
            ("status",),
            registry=registry,
        )
        self._bytes = Gauge(
            "mlx_parallm:mezo_stored_bytes",
            "Data and logs of all training sessions.",
            registry=registry,
        )
        self._steps = Counter("mlx_parallm:mezo_steps", "Steps that were made.", registry=registry)
        self._zero_steps = Counter(
            "mlx_parallm:mezo_zero_gradient_steps",
            "Steps that changed nothing, because all losses were equal.",
            registry=registry,
        )
        self._counters = {
            field: Counter(name, text, registry=registry) for field, name, text in COUNTERS
        }

    def on_step(self, record: StepRecord) -> None:
        """Count a step that was made."""
        self._steps.inc()
        self._zero_steps.inc(record.is_zero)
        for field, counter in self._counters.items():
            counter.inc(getattr(record, field))

    def text(self, statuses: Iterable[Status], num_bytes: int) -> bytes:
        """Return the exposition.

        Args:
            statuses: of all sessions.
            num_bytes: of their data and logs.
        """
        counts = CountOf(statuses)
        for status in Status:
            self._sessions.labels(status.value).set(counts[status])
        self._bytes.set(num_bytes)
        return generate_latest(self._registry)
