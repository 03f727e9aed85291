"""Prometheus metrics of the stores below the KV pool, read at each scrape.

Stores write, fail and work again while the engine is idle, so its steps cannot keep values current.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from typing_extensions import override

from mlx_parallm.generation.kv_cache.peer.prefill import PrefillStats
from mlx_parallm.generation.kv_cache.tiers import TiersStats, TierStats

Family = CounterMetricFamily | GaugeMetricFamily
LABELS = ("model_name", "engine")


class TierSource(Protocol):
    """A model with stores; any thread may read it."""

    @property
    def num_missed_tokens(self) -> int:
        """Prompt tokens that memory did not have."""
        ...

    def read_tiers(self) -> TiersStats:
        """Return the state of the stores, and their counters."""
        ...


@dataclass(frozen=True, slots=True)
class _Metric:
    """A metric with a value for each tier."""

    text: str
    read: Callable[[TierStats], float]


# TIER_COUNTERS, TIER_GAUGES: by the end of their names.
TIER_COUNTERS: Mapping[str, _Metric] = {
    "hit_tokens": _Metric("Prompt tokens whose KV came from it.", lambda tier: tier.hit_tokens),
    "read_blocks": _Metric("Blocks and states read from it.", lambda tier: tier.store.read_blocks),
    "read_bytes": _Metric("Bytes read from it.", lambda tier: tier.store.read_bytes),
    "written_blocks": _Metric(
        "Blocks and states written to it.", lambda tier: tier.store.written_blocks
    ),
    "written_bytes": _Metric("Bytes written to it.", lambda tier: tier.store.written_bytes),
}
TIER_GAUGES: Mapping[str, _Metric] = {
    "blocks": _Metric(
        "Blocks and states of the model that it has.", lambda tier: tier.store.num_blocks
    ),
    "used_bytes": _Metric(
        "Bytes in it; on a disk, those of all models and processes.",
        lambda tier: tier.store.used_bytes,
    ),
    "limit_bytes": _Metric("Most bytes in it.", lambda tier: tier.store.limit_bytes),
    "off": _Metric(
        "1 while it keeps nothing, as on a full disk.", lambda tier: bool(tier.store.off)
    ),
}


class TierCollector(Collector):
    """Reads the stores of all models at each scrape; without any, it has no metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._sources: WeakValueDictionary[tuple[str, str], TierSource] = WeakValueDictionary()
        registry.register(self)

    def add(self, labels: tuple[str, str], source: TierSource) -> None:
        """Read a model's stores, as long as it lives; ``labels`` are the values of ``LABELS``."""
        self._sources[labels] = source

    @override
    def collect(self) -> Generator[Family]:
        read = [
            (labels, source.num_missed_tokens, source.read_tiers())
            for labels, source in list(self._sources.items())
        ]
        if read:
            yield from _of_all_tiers(read)
            yield from _by_tier([(labels, tiers) for labels, _, tiers in read])
            yield from _elsewhere([(labels, tiers.prefill) for labels, _, tiers in read])


def _of_all_tiers(read: list[tuple[tuple[str, str], int, TiersStats]]) -> Iterator[Family]:
    """Yield what is counted for all tiers together, under vLLM's names where it has some."""
    queries = CounterMetricFamily(
        "vllm:external_prefix_cache_queries",
        "Prompt tokens that memory did not have.",
        None,
        LABELS,
    )
    hits = CounterMetricFamily(
        "vllm:external_prefix_cache_hits", "Prompt tokens whose KV came from a tier.", None, LABELS
    )
    reads = CounterMetricFamily(
        "mlx_parallm:kv_reads", "Prompts that waited for KV from a tier.", None, LABELS
    )
    late = CounterMetricFamily(
        "mlx_parallm:kv_late_reads", "Reads given up, to compute instead.", None, LABELS
    )
    waits = CounterMetricFamily(
        "mlx_parallm:kv_read_wait_seconds", "Time that prompts waited for KV.", None, LABELS
    )
    unsaved = GaugeMetricFamily(
        "mlx_parallm:kv_unsaved_blocks",
        "Blocks and states in memory that wait to be saved.",
        None,
        LABELS,
    )
    for labels, num_missed, tiers in read:
        queries.add_metric(labels, num_missed)
        hits.add_metric(labels, tiers.hit_tokens)
        reads.add_metric(labels, tiers.num_reads)
        late.add_metric(labels, tiers.num_late)
        waits.add_metric(labels, tiers.wait_s)
        unsaved.add_metric(labels, tiers.num_unsaved)
    yield from (queries, hits, reads, late, waits, unsaved)


def _by_tier(read: list[tuple[tuple[str, str], TiersStats]]) -> Iterator[Family]:
    tiers = [(labels, tier) for labels, stats in read for tier in stats.tiers]
    for kind, metrics in (
        (CounterMetricFamily, TIER_COUNTERS),
        (GaugeMetricFamily, TIER_GAUGES),
    ):
        for name, metric in metrics.items():
            family = kind(f"mlx_parallm:kv_tier_{name}", metric.text, None, (*LABELS, "tier"))
            for labels, tier in tiers:
                family.add_metric((*labels, tier.tier), metric.read(tier))
            yield family
    discarded = CounterMetricFamily(
        "mlx_parallm:kv_tier_discarded_blocks",
        "Blocks and states that it did not keep or could not return, by reason.",
        None,
        (*LABELS, "tier", "reason"),
    )
    for labels, tier in tiers:
        for reason, count in tier.store.discarded.items():
            discarded.add_metric((*labels, tier.tier, reason), count)
    yield discarded


def _elsewhere(read: list[tuple[tuple[str, str], PrefillStats | None]]) -> Iterator[Family]:
    """Yield what other servers compute; nothing without ``--prefill-peer``."""
    known = [(labels, stats) for labels, stats in read if stats is not None]
    if not known:
        return
    used = CounterMetricFamily(
        "mlx_parallm:prefill_peer_used", "Prompts of which a peer computed KV.", None, LABELS
    )
    tokens = CounterMetricFamily(
        "mlx_parallm:prefill_peer_tokens", "Prompt tokens that a peer computed.", None, LABELS
    )
    declined = CounterMetricFamily(
        "mlx_parallm:prefill_peer_declined",
        "Long prompts that were computed here, at least in part, by reason.",
        None,
        (*LABELS, "reason"),
    )
    for labels, stats in known:
        used.add_metric(labels, stats.used)
        tokens.add_metric(labels, stats.hit_tokens)
        for reason, count in stats.declined.items():
            declined.add_metric((*labels, reason), count)
    yield from (used, tokens, declined)
