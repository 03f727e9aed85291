"""Prometheus metrics of adapters, weights and pauses."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterable, Mapping
from dataclasses import asdict

from prometheus_client import CollectorRegistry, Gauge, Histogram

from mlx_parallm.engine.models import ModelMemory
from mlx_parallm.engine.policies import AdapterInfo
from mlx_parallm.engine.status import EngineReport
from mlx_parallm.types.request import WeightsVersion

DURATIONS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
#: ``ADAPTER`` and ``WEIGHTS`` are the kinds of updates: of an adapter, or of a model's weights.
ADAPTER, WEIGHTS = "adapter", "weights"


class ControlMetrics:
    """Filled on the event loop, where control is; a scrape may read them from any thread."""

    def __init__(self, registry: CollectorRegistry, max_loras: int) -> None:
        """Declare them; ``max_loras`` is the most adapters in one batch."""
        self._max_loras = str(max_loras)
        # Gateways route by vLLM's metric: adapters are listed in labels, the value is the time.
        self._requests = Gauge(
            "vllm:lora_requests_info",
            "Unix time of the adapters of requests that run and wait.",
            ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
            registry=registry,
        )
        self._versions = Gauge(
            "mlx_parallm:weight_version_info",
            "1 for the version of the weights of each model and adapter.",
            ("model_name", "adapter", "version"),
            registry=registry,
        )
        self._paused = Gauge(
            "mlx_parallm:paused", "1 while nothing is generated.", registry=registry
        )
        self._sleep_level = Gauge(
            "mlx_parallm:sleep_level", "0 awake, 1 KV put away, 2 weights too.", registry=registry
        )
        self._loaded = Gauge(
            "mlx_parallm:adapters_loaded", "Adapters.", ("model_name",), registry=registry
        )
        self._memory = Gauge(
            "mlx_parallm:model_memory_bytes",
            "Memory of each model at all engines: weights, KV pool, kept results, adapters.",
            ("model_name", "kind"),
            registry=registry,
        )
        self._ready = Gauge(
            "mlx_parallm:engine_ready",
            "1 for an engine that gets requests and answers.",
            ("engine",),
            registry=registry,
        )
        self._steps = Gauge(
            "mlx_parallm:engine_step_seconds",
            "Time that the step in flight of each engine has run.",
            ("engine",),
            registry=registry,
        )
        self._updates = Histogram(
            "mlx_parallm:update_duration_seconds",
            "Time from a parsed update to its serving.",
            ("kind",),
            buckets=DURATIONS_S,
            registry=registry,
        )

    def on_versions(
        self, adapters: Iterable[AdapterInfo], versions: Mapping[str, WeightsVersion]
    ) -> None:
        """Set the versions of the adapters and of each model's weights."""
        self._versions.clear()
        self._loaded.clear()
        for name, version in versions.items():
            self._versions.labels(name, "", version.label).set(1)
            self._loaded.labels(name).set(0)
        for info in adapters:
            self._versions.labels(info.model, info.name, info.version).set(1)
            self._loaded.labels(info.model).inc()

    def on_requests(self, running: Iterable[str], waiting: Iterable[str]) -> None:
        """Set the adapters of running requests, and those of which all requests wait."""
        # One series, whose labels change: vLLM keeps each combination that it ever had.
        self._requests.clear()
        names = (",".join(sorted(each)) for each in (waiting, running))
        self._requests.labels(self._max_loras, *names).set_to_current_time()

    def on_memory(self, memory: Mapping[str, ModelMemory]) -> None:
        """Set the memory of each model."""
        self._memory.clear()
        for name, used in memory.items():
            for kind, num_bytes in asdict(used).items():
                self._memory.labels(name, kind).set(num_bytes)

    def on_engines(self, reports: Iterable[EngineReport]) -> None:
        """Set which engines are ready, and how long their steps have run."""
        for report in reports:
            self._ready.labels(str(report.rank)).set(report.is_ready)
            self._steps.labels(str(report.rank)).set(report.step_s)

    def on_state(self, *, is_paused: bool, sleep_level: int) -> None:
        """Set what changes with a pause or with sleep."""
        self._paused.set(is_paused)
        self._sleep_level.set(sleep_level)

    @contextlib.contextmanager
    def timed(self, kind: str) -> Generator[None]:
        """Measure an update; one that fails does not count."""
        begin_s = time.perf_counter()
        yield
        self._updates.labels(kind).observe(time.perf_counter() - begin_s)
