"""Prometheus metrics under vLLM's names, so that its dashboards work unchanged.

The metrics are written on the engine thread; a scrape may read them from any thread.
"""

from __future__ import annotations

import collections
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.generation.kv_cache.snapshots import SnapshotStats
from mlx_parallm.generation.kv_cache.tiers import TiersStats
from mlx_parallm.generation.scheduler.updates import SchedulerStats, SpeculationStats
from mlx_parallm.generation.tier_metrics import TierCollector
from mlx_parallm.types.events import ErrorEvent, GenerateEvent, PromptEvent, TokenEvent
from mlx_parallm.types.request import GenerateRequest
from mlx_parallm.types.step import RunnerInfo, ScheduledBatch

LABELS = ("model_name", "engine")
LATENCY_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0)
FIRST_TOKEN_S = (
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
    40.0,
)
TOKEN_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)
#: ``COMPUTED``, ``CACHED``: vLLM's names of where KV of prompt tokens comes from.
COMPUTED, CACHED = "local_compute", "local_cache_hit"
SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128)


class CountingHistogram(Histogram):
    """A histogram that takes equal values at once."""

    def observe_counts(self, counts: Mapping[float, int]) -> None:
        """Observe values, each so many times."""
        # ``Histogram.observe`` takes one value, and these fields have no types.
        histogram: Any = self
        for value, count in counts.items():
            histogram._sum.inc(value * count)
            histogram._buckets[bisect_left(histogram._upper_bounds, value)].inc(count)


class GenerationFamilies:
    """The metric families of models that generate; engines add label values."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._define_queue()
        self._define_tokens()
        self._define_inputs()
        self._define_snapshots()
        self._define_requests()

    def _define_queue(self) -> None:
        self.running = self._gauge("num_requests_running", "Sequences running.")
        self.waiting = self._gauge("num_requests_waiting", "Sequences waiting.")
        self.rejections = self._counter("admission_rejections", "Requests refused: queue full.")
        self.preemptions = self._counter("num_preemptions", "Preemptions.")
        self.kv_usage = self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")
        facts = ("block_size", "num_gpu_blocks", "cache_dtype", "attention_backend", "path")
        self.cache_config = self._gauge("cache_config_info", "The KV pool.", *facts)

    def _define_tokens(self) -> None:
        self.prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up.")
        self.prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found cached.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens computed or reused.")
        self.prompt_tokens_by_source = self._counter(
            "prompt_tokens_by_source", "Prompt tokens, computed or found cached.", "source"
        )
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.iteration_tokens = self._histogram("iteration_tokens_total", "Tokens a step.", TOKENS)
        self.drafts = self._counter("spec_decode_num_drafts", "Runs of proposals verified.")
        self.draft_tokens = self._counter("spec_decode_num_draft_tokens", "Tokens proposed.")
        self.accepted_tokens = self._counter(
            "spec_decode_num_accepted_tokens", "Proposed tokens accepted."
        )
        self.accepted_per_position = self._counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Proposed tokens accepted, by their place in the run.",
            "position",
        )

    def _define_inputs(self) -> None:
        self.tower_runs = self._counter("image_tower_runs", "Images whose features were computed.")
        self.feature_hits = self._counter("image_feature_hits", "Images whose features were kept.")
        self.feature_bytes = self._gauge("image_feature_bytes", "Bytes of features that are kept.")
        self.encoder_runs = self._counter("source_encoder_runs", "Sources that were encoded.")
        self.source_hits = self._counter("source_hits", "Sources whose KV was kept.")

    def _define_snapshots(self) -> None:
        self.snapshots = self._gauge("state_snapshots", "States kept after cached prefixes.")
        self.snapshot_bytes = self._gauge("state_snapshot_bytes", "Bytes of these states.")
        self.captures = self._counter("state_snapshot_captures", "States that were kept.")
        self.snapshot_evictions = self._counter("state_snapshot_evictions", "States evicted.")

    def _define_requests(self) -> None:
        self.first_token = self._histogram("time_to_first_token_seconds", "", FIRST_TOKEN_S)
        self.inter_token = self._histogram("inter_token_latency_seconds", "", TOKEN_S)
        self.per_token = self._histogram("request_time_per_output_token_seconds", "", TOKEN_S)
        self.e2e = self._histogram("e2e_request_latency_seconds", "", LATENCY_S)
        self.queue_time = self._histogram("request_queue_time_seconds", "", LATENCY_S)
        self.prefill_time = self._histogram("request_prefill_time_seconds", "", LATENCY_S)
        self.decode_time = self._histogram("request_decode_time_seconds", "", LATENCY_S)
        self.inference_time = self._histogram("request_inference_time_seconds", "", LATENCY_S)
        self.success = self._counter(
            "request_success", "Samples finished, by reason.", "finished_reason"
        )
        self.request_prompt = self._histogram("request_prompt_tokens", "", TOKENS)
        self.request_generation = self._histogram("request_generation_tokens", "", TOKENS)
        self.max_generation = self._histogram("request_max_num_generation_tokens", "", TOKENS)
        self.params_n = self._histogram("request_params_n", "", SAMPLES)
        self.params_max_tokens = self._histogram("request_params_max_tokens", "", TOKENS)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, (*LABELS, *labels), registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"vllm:{name}", text, (*LABELS, *labels), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> CountingHistogram:
        documentation = text or name.replace("_", " ").capitalize() + "."
        return CountingHistogram(
            f"vllm:{name}", documentation, LABELS, registry=self.registry, buckets=tuple(buckets)
        )


@dataclass(slots=True)
class RequestTimes:
    """Clock readings of one request, in seconds of the monotonic clock."""

    prompt_len: int
    open_samples: int
    max_tokens: int | None
    arrival_s: float
    started_s: float | None = None
    first_token_s: float | None = None
    last_token_s: dict[int, float] = field(default_factory=dict[int, float])
    num_tokens: dict[int, int] = field(default_factory=dict[int, int])


class EngineMetrics:
    """Fills the metric families for one model.

    Attributes:
        stats: the queues after the latest step; any thread may read it.
    """

    def __init__(
        self,
        metrics: MetricFamilies,
        model_name: str,
        info: RunnerInfo,
        *,
        clock: Callable[[], float] = time.monotonic,
        read_tiers: Callable[[], TiersStats] | None = None,
    ) -> None:
        """Prepare.

        Args:
            metrics: the families of the process.
            model_name: a label's value.
            info: describes the KV pool.
            clock: returns seconds.
            read_tiers: returns the state of the stores below the pool, on any thread; None without
                stores.
        """
        families = self._families = metrics.of(GenerationFamilies)
        self._labels = (model_name, "0")
        self._clock = clock
        self._times: dict[str, RequestTimes] = {}
        self.stats = SchedulerStats()
        families.cache_config.labels(
            *self._labels,
            str(info.block_size),
            str(info.num_blocks),
            info.kv_cache_dtype,
            info.attention_backend,
            info.path,
        ).set(1)
        self._read_tiers = read_tiers
        if read_tiers is not None:
            metrics.of(TierCollector).add(self._labels, self)
        self.on_queue(self.stats)
        self._inter_token = families.inter_token.labels(*self._labels)
        self._generated = families.generation_tokens.labels(*self._labels)
        self._iteration = families.iteration_tokens.labels(*self._labels)

    @property
    def num_missed_tokens(self) -> int:
        """See ``TierSource``."""
        return self.stats.prefix_queries - self.stats.prefix_hits

    def read_tiers(self) -> TiersStats:
        """See ``TierSource``."""
        return TiersStats() if self._read_tiers is None else self._read_tiers()

    def on_add(self, request: GenerateRequest, arrival_s: float | None) -> None:
        """Count a request that was queued."""
        params = request.params
        now = self._clock() if arrival_s is None else arrival_s
        self._times[request.request_id] = RequestTimes(
            request.num_prompt_tokens, params.n, params.max_tokens, now
        )
        self._families.params_n.labels(*self._labels).observe(params.n)
        if params.max_tokens is not None:
            self._families.params_max_tokens.labels(*self._labels).observe(params.max_tokens)

    def on_reject(self) -> None:
        """Count a request that was refused because the queue was full."""
        self._families.rejections.labels(*self._labels).inc()

    def on_abort(self, request_id: str) -> None:
        """Count a request that was aborted."""
        if self._times.pop(request_id, None) is not None:
            self._families.success.labels(*self._labels, "abort").inc()

    def on_schedule(self, started: Iterable[str], batch: ScheduledBatch) -> None:
        """Note a batch about to run; ``started`` are the requests in it for the first time."""
        now = self._clock()
        if batch.sequences:
            self._iteration.observe(batch.num_tokens)
        for request_id in started:
            times = self._times.get(request_id)
            if times is not None:
                times.started_s = now
                self._observe(self._families.queue_time, now - times.arrival_s)

    def on_events(self, events: Iterable[GenerateEvent]) -> None:
        """Note a step's events that are about to be sent."""
        now, generated = self._clock(), 0
        # Most samples got their last token in the same step, and so have the same latency.
        latencies = collections.Counter[float]()
        for event in events:
            times = self._times.get(event.request_id)
            if times is None:
                continue
            match event:
                case TokenEvent():
                    generated += len(event.token_ids)
                    self._on_tokens(event, times, now, latencies)
                case PromptEvent():
                    self._on_prompt(times.prompt_len, event.num_cached_tokens)
                case ErrorEvent():
                    self._families.success.labels(*self._labels, "error").inc()
                    del self._times[event.request_id]
        self._generated.inc(generated)
        self._inter_token.observe_counts(latencies)

    def _on_prompt(self, num_tokens: int, num_cached: int) -> None:
        families, labels = self._families, self._labels
        families.prompt_tokens.labels(*labels).inc(num_tokens)
        by_source = families.prompt_tokens_by_source
        by_source.labels(*labels, COMPUTED).inc(num_tokens - num_cached)
        by_source.labels(*labels, CACHED).inc(num_cached)

    def on_queue(self, stats: SchedulerStats) -> None:
        """Note that the queues changed."""
        families, labels, last = self._families, self._labels, self.stats
        families.running.labels(*labels).set(stats.num_running)
        families.waiting.labels(*labels).set(stats.num_waiting)
        families.kv_usage.labels(*labels).set(stats.kv_usage)
        families.preemptions.labels(*labels).inc(stats.num_preemptions - last.num_preemptions)
        families.prefix_queries.labels(*labels).inc(stats.prefix_queries - last.prefix_queries)
        families.prefix_hits.labels(*labels).inc(stats.prefix_hits - last.prefix_hits)
        computed = stats.images_computed - last.images_computed
        families.tower_runs.labels(*labels).inc(computed)
        families.feature_hits.labels(*labels).inc(stats.images_found - last.images_found)
        families.feature_bytes.labels(*labels).set(stats.input_bytes)
        families.encoder_runs.labels(*labels).inc(stats.sources_computed - last.sources_computed)
        families.source_hits.labels(*labels).inc(stats.sources_found - last.sources_found)
        self._on_speculation(stats.speculation, last.speculation)
        if stats.snapshots != last.snapshots:
            self._on_snapshots(stats.snapshots, last.snapshots)
        self.stats = stats

    def _on_snapshots(self, now: SnapshotStats, last: SnapshotStats) -> None:
        families, labels = self._families, self._labels
        families.snapshots.labels(*labels).set(now.num_used)
        families.snapshot_bytes.labels(*labels).set(now.used_bytes)
        families.captures.labels(*labels).inc(now.num_captured - last.num_captured)
        families.snapshot_evictions.labels(*labels).inc(now.num_evicted - last.num_evicted)

    def _on_speculation(self, now: SpeculationStats, last: SpeculationStats) -> None:
        families, labels = self._families, self._labels
        if not now.accepted_per_position:
            return
        families.drafts.labels(*labels).inc(now.num_drafts - last.num_drafts)
        families.draft_tokens.labels(*labels).inc(now.num_draft_tokens - last.num_draft_tokens)
        accepted = now.num_accepted_tokens - last.num_accepted_tokens
        families.accepted_tokens.labels(*labels).inc(accepted)
        before = last.accepted_per_position or (0,) * len(now.accepted_per_position)
        for position, count in enumerate(now.accepted_per_position):
            family = families.accepted_per_position.labels(*labels, str(position))
            family.inc(count - before[position])

    def _on_tokens(
        self,
        event: TokenEvent,
        times: RequestTimes,
        now: float,
        latencies: collections.Counter[float],
    ) -> None:
        count = len(event.token_ids)
        if count:
            last = times.last_token_s.get(event.index)
            if last is not None:
                # Further tokens of one step come together: they have no latency of their own.
                if now > last:
                    latencies[(now - last) / count] += 1
            elif times.first_token_s is None:
                times.first_token_s = now
                self._observe(self._families.first_token, now - times.arrival_s)
            times.last_token_s[event.index] = now
            times.num_tokens[event.index] = times.num_tokens.get(event.index, 0) + count
        if event.finish_reason is not None:
            self._on_finish(event, times, now)

    def _on_finish(self, event: TokenEvent, times: RequestTimes, now: float) -> None:
        families = self._families
        families.success.labels(*self._labels, str(event.finish_reason)).inc()
        times.open_samples -= 1
        if times.open_samples > 0:
            return
        del self._times[event.request_id]
        counts = times.num_tokens or {0: 0}
        started = times.arrival_s if times.started_s is None else times.started_s
        first = now if times.first_token_s is None else times.first_token_s
        self._observe(families.e2e, now - times.arrival_s)
        self._observe(families.prefill_time, first - started)
        self._observe(families.decode_time, now - first)
        self._observe(families.inference_time, now - started)
        self._observe(families.request_prompt, times.prompt_len)
        self._observe(families.request_generation, sum(counts.values()))
        longest = max(counts.values(), default=0)
        self._observe(families.max_generation, longest)
        if longest > 1:
            self._observe(families.per_token, (now - first) / (longest - 1))

    def _observe(self, histogram: Histogram, value: float) -> None:
        histogram.labels(*self._labels).observe(value)
