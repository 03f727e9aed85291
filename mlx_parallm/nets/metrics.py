"""Prometheus metrics of nets. They are written on the engine thread."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from mlx_parallm.engine.metrics import MetricFamilies

LABELS = ("model_name",)
SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)


class NetFamilies:
    """The metric families; each net adds label values."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"mlx_parallm:net_{name}", text, LABELS, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"mlx_parallm:net_{name}", text, LABELS, registry=registry)

        self.requests = counter("requests", "Requests that were answered.")
        self.rows = counter("rows", "Rows computed.")
        self.dropped = counter("dropped_sequences", "Sequences that made room or were too old.")
        self.sequences = gauge("sequences", "Sequences whose state is kept.")
        self.state_bytes = gauge("state_bytes", "Memory of kept states.")
        self.forward_rows = Histogram(
            "mlx_parallm:net_forward_rows",
            "Rows a forward.",
            LABELS,
            registry=registry,
            buckets=ROWS,
        )
        self.forward_time = Histogram(
            "mlx_parallm:net_forward_seconds",
            "Time of a forward.",
            LABELS,
            registry=registry,
            buckets=SECONDS,
        )


class NetMetrics:
    """Writes the metrics of one net."""

    def __init__(self, metrics: MetricFamilies, model_name: str) -> None:
        families = metrics.of(NetFamilies)
        self._requests = families.requests.labels(model_name)
        self._rows = families.rows.labels(model_name)
        self._dropped = families.dropped.labels(model_name)
        self._sequences = families.sequences.labels(model_name)
        self._state_bytes = families.state_bytes.labels(model_name)
        self._forward_rows = families.forward_rows.labels(model_name)
        self._forward_time = families.forward_time.labels(model_name)
        self._num_dropped = 0

    def on_forward(self, num_requests: int, num_rows: int, seconds: float) -> None:
        """Record a forward."""
        self._requests.inc(num_requests)
        self._rows.inc(num_rows)
        self._forward_rows.observe(num_rows)
        self._forward_time.observe(seconds)

    def on_states(self, count: int, num_bytes: int, num_dropped: int) -> None:
        """Record what is kept of sequences; ``num_dropped`` since the net was loaded."""
        self._sequences.set(count)
        self._state_bytes.set(num_bytes)
        self._dropped.inc(num_dropped - self._num_dropped)
        self._num_dropped = num_dropped
