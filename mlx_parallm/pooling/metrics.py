"""Prometheus metrics of pooling models, under this project's own names: vLLM has none.

They are written on the engine thread and may be read from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from mlx_parallm.engine.metrics import MetricFamilies

LABELS = ("model_name",)
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
INPUTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class PoolingFamilies:
    """The metric families; each pooling model adds label values."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.inputs = self._counter("inputs", "Inputs that were asked for.")
        self.cache_hits = self._counter("cache_hits", "Inputs whose results were kept.")
        self.tokens = self._counter("tokens", "Tokens computed.")
        self.padding = self._counter("padding_tokens", "Padding computed.")
        self.waiting = Gauge(
            "mlx_parallm:encoder_waiting_inputs",
            "Distinct inputs that wait.",
            LABELS,
            registry=registry,
        )
        self.batch_inputs = self._histogram("batch_inputs", "Inputs a batch.", INPUTS)
        self.batch_tokens = self._histogram("batch_tokens", "Padded tokens a batch.", TOKENS)
        self.batch_time = self._histogram("batch_seconds", "Time of a batch.", SECONDS)
        self.request_time = self._histogram(
            "request_seconds", "Time from a request's arrival at the engine to its answer.", SECONDS
        )

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"mlx_parallm:encoder_{name}", text, LABELS, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(
            f"mlx_parallm:encoder_{name}", text, LABELS, registry=self._registry, buckets=buckets
        )


class PoolingMetrics:
    """Writes the metrics of one pooling model. Times are in seconds."""

    def __init__(self, metrics: MetricFamilies, model_name: str) -> None:
        families = metrics.of(PoolingFamilies)
        self._inputs = families.inputs.labels(model_name)
        self._cache_hits = families.cache_hits.labels(model_name)
        self._tokens = families.tokens.labels(model_name)
        self._padding = families.padding.labels(model_name)
        self._waiting = families.waiting.labels(model_name)
        self._batch_inputs = families.batch_inputs.labels(model_name)
        self._batch_tokens = families.batch_tokens.labels(model_name)
        self._batch_time = families.batch_time.labels(model_name)
        self._request_time = families.request_time.labels(model_name)

    def on_request(self, num_inputs: int, num_hits: int) -> None:
        """Count a request's inputs and those answered from the cache."""
        self._inputs.inc(num_inputs)
        self._cache_hits.inc(num_hits)

    def on_waiting(self, num_inputs: int) -> None:
        """Set how many distinct inputs wait."""
        self._waiting.set(num_inputs)

    def on_batch(self, lengths: Sequence[int], seconds: float) -> None:
        """Record a batch: the tokens of each input, and the seconds that it took."""
        padded, tokens = len(lengths) * max(lengths), sum(lengths)
        self._tokens.inc(tokens)
        self._padding.inc(padded - tokens)
        self._batch_inputs.observe(len(lengths))
        self._batch_tokens.observe(padded)
        self._batch_time.observe(seconds)

    def on_answer(self, seconds: float) -> None:
        """Record the seconds from a request's arrival to its answer."""
        self._request_time.observe(seconds)
