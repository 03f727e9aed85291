"""Metrics of the stores below the KV pool."""

from __future__ import annotations

import gc
from dataclasses import fields, replace
from typing import Any

import pytest
from prometheus_client import generate_latest

from mlx_parallm.engine.metrics import MetricFamilies, labelled_by_engine
from mlx_parallm.generation.kv_cache.peer.prefill import PrefillStats
from mlx_parallm.generation.kv_cache.stores import StoreStats
from mlx_parallm.generation.kv_cache.tiers import TiersStats, TierStats
from mlx_parallm.generation.metrics import EngineMetrics
from mlx_parallm.generation.scheduler.updates import SchedulerStats
from tests.fakes import make_info

STORE = StoreStats(
    num_blocks=7,
    used_bytes=7000,
    limit_bytes=9000,
    read_blocks=3,
    read_bytes=3000,
    written_blocks=8,
    written_bytes=8000,
    discarded={"damaged": 2},
)
DISK = TierStats(tier="disk", hit_tokens=48, store=STORE)
HOST = TierStats(tier="host", hit_tokens=16, store=StoreStats(limit_bytes=100))
PREFILL = PrefillStats(used=3, hit_tokens=32, declined={"busy": 2})
TIERS = TiersStats(
    tiers=(HOST, DISK), num_reads=2, num_late=1, wait_s=0.5, num_unsaved=4, prefill=PREFILL
)


class Model:
    """A model with stores, whose state a test sets."""

    def __init__(self, tiers: TiersStats | None) -> None:
        self.tiers = tiers
        self.families = MetricFamilies()
        read = None if tiers is None else self._read
        self.metrics = EngineMetrics(self.families, "m", make_info(), read_tiers=read)
        self.metrics.on_queue(SchedulerStats(prefix_queries=100, prefix_hits=20))

    def _read(self) -> TiersStats:
        assert self.tiers is not None
        return self.tiers

    def text(self) -> bytes:
        return generate_latest(self.families.registry)

    def value(self, name: str, **labels: str) -> float | None:
        labels = {"model_name": "m", "engine": "0"} | labels
        return self.families.registry.get_sample_value(name, labels)


@pytest.mark.parametrize("name", [field.name for field in fields(StoreStats)])
def test_each_field_of_a_store_changes_the_text(name: str) -> None:
    changed = StoreStats(**{name: getattr(replace(STORE, off="gone"), name)})
    lines = [
        Model(TiersStats(tiers=(TierStats(tier="disk", store=store),))).text().splitlines()
        for store in (StoreStats(), changed)
    ]
    first, second = ([line for line in each if b"kv_tier" in line] for each in lines)
    assert first != second


@pytest.mark.parametrize(
    "changed",
    [{field.name: getattr(TIERS, field.name)} for field in fields(TiersStats)],
    ids=lambda changed: next(iter(changed)),
)
def test_each_field_of_all_stores_changes_the_text(changed: dict[str, Any]) -> None:
    lines = [Model(stats).text().splitlines() for stats in (TiersStats(), TiersStats(**changed))]
    first, second = ([line for line in each if b"_created" not in line] for each in lines)
    assert first != second


def test_a_model_without_stores_has_no_metrics_of_them() -> None:
    text = Model(None).text()
    assert b"kv_tier" not in text
    assert b"external_prefix" not in text


def test_values_are_shown_by_tier() -> None:
    model = Model(TIERS)
    shown = {
        "hit_tokens_total": 48,
        "read_blocks_total": 3,
        "read_bytes_total": 3000,
        "written_blocks_total": 8,
        "written_bytes_total": 8000,
        "blocks": 7,
        "used_bytes": 7000,
        "limit_bytes": 9000,
        "off": 0,
    }
    for name, wanted in shown.items():
        assert model.value(f"mlx_parallm:kv_tier_{name}", tier="disk") == wanted
    assert model.value("mlx_parallm:kv_tier_limit_bytes", tier="host") == 100
    discarded = "mlx_parallm:kv_tier_discarded_blocks_total"
    assert model.value(discarded, tier="disk", reason="damaged") == 2


def test_all_stores_together_have_the_names_of_vllm() -> None:
    model = Model(TIERS)
    assert model.value("vllm:external_prefix_cache_queries_total") == 80
    assert model.value("vllm:external_prefix_cache_hits_total") == 64 + PREFILL.hit_tokens
    assert model.value("vllm:prefix_cache_hits_total") == 20
    assert model.value("mlx_parallm:kv_reads_total") == 2
    assert model.value("mlx_parallm:kv_late_reads_total") == 1
    assert model.value("mlx_parallm:kv_read_wait_seconds_total") == 0.5
    assert model.value("mlx_parallm:kv_unsaved_blocks") == 4


def test_a_scrape_sees_what_happened_while_no_step_ran() -> None:
    model = Model(TIERS)
    store = replace(STORE, off="No space left on device", written_blocks=9)
    model.tiers = replace(TIERS, tiers=(HOST, replace(DISK, store=store)))
    assert model.value("mlx_parallm:kv_tier_off", tier="disk") == 1
    assert model.value("mlx_parallm:kv_tier_written_blocks_total", tier="disk") == 9


def test_an_engine_that_is_gone_is_not_read() -> None:
    model = Model(TIERS)
    families, model.metrics = model.families, EngineMetrics(MetricFamilies(), "m", make_info())
    gc.collect()
    assert b"kv_tier" not in generate_latest(families.registry)


def test_engines_are_told_apart() -> None:
    text = labelled_by_engine({rank: Model(TIERS).text() for rank in range(2)})
    for rank in range(2):
        sample = b'kv_tier_used_bytes{engine="%d",model_name="m",tier="disk"} 7000.0' % rank
        assert sample in text
    assert text.count(b"# TYPE mlx_parallm:kv_tier_used_bytes gauge") == 1


@pytest.mark.parametrize("name", ["used_total", "tokens_total", 'declined_total{reason="busy"'])
def test_what_a_peer_computes_is_counted(name: str) -> None:
    name, _, label = name.partition("{")
    lines = Model(TIERS).text().decode().splitlines()
    (line,) = [each for each in lines if each.startswith(f"mlx_parallm:prefill_peer_{name}{{")]
    assert label in line
    assert float(line.rpartition(" ")[2]) == {"used_total": 3, "tokens_total": 32}.get(name, 2)
