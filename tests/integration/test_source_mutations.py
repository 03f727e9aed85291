"""Faults in how sources are read make the check at load fail, and tests that compare answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.types.step import ScheduledSequence, SourceTable
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation import source_rows
from mlx_parallm.worker.generation.inputs import sources
from mlx_parallm.worker.generation.inputs.sources import SourceEncoder
from mlx_parallm.worker.generation.paged_cache import PagedLayerCache
from mlx_parallm.worker.generation.source_rows import SourceRows
from tests.compiled_attention import CompiledAttention
from tests.integration.test_sources import requests_of, t5_adapter
from tests.source_batches import (
    BLOCK_SIZE,
    Batch,
    Request,
    alone,
    merged,
    new_runner,
    note,
    same,
    tiny_t5,
)

Mutation = Callable[[pytest.MonkeyPatch], None]
Rows = Sequence[ScheduledSequence]


def changed_tables(change: Callable[[list[SourceTable]], list[SourceTable]]) -> Mutation:
    """Return what changes the sources that rows read."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        original = source_rows.sources_of
        patch.setattr(source_rows, "sources_of", lambda rows: change(original(rows)))

    return apply


def shorter(tables: list[SourceTable]) -> list[SourceTable]:
    return [replace(each, num_tokens=max(1, each.num_tokens - 1)) for each in tables]


def rotated(tables: list[SourceTable]) -> list[SourceTable]:
    return tables[1:] + tables[:1]


def without_bias(patch: pytest.MonkeyPatch) -> None:
    original = PagedLayerCache.attend

    def attend(self: Any, *arrays: mx.array, scale: float, **_: Any) -> mx.array:
        return original(self, *arrays, scale=scale)

    patch.setattr(PagedLayerCache, "attend", attend)


def without_source(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SourceRows, "plan", lambda *_: None)


def with_the_first_plan(patch: pytest.MonkeyPatch) -> None:
    """Keep a plan for other rows of the same number."""
    original = source_rows.sources_of
    kept: dict[int, list[SourceTable]] = {}

    def sources_of(rows: Rows) -> list[SourceTable]:
        tables = original(rows)
        return kept.setdefault(len(tables), tables)

    patch.setattr(source_rows, "sources_of", sources_of)


def written_before_its_place(patch: pytest.MonkeyPatch) -> None:
    original = SourceRows.write

    def write(self: Any, pools: Any, tables: Sequence[SourceTable], layers: Any) -> None:
        moved = [(each.block_table[-1], *each.block_table[:-1]) for each in tables]
        pairs = zip(tables, moved, strict=True)
        original(self, pools, [replace(each, block_table=own) for each, own in pairs], layers)

    patch.setattr(SourceRows, "write", write)


MUTATIONS: dict[str, Mutation] = {
    "another position": changed_tables(shorter),
    "another table": changed_tables(rotated),
    "no bias": without_bias,
    "no source": without_source,
    "an old plan": with_the_first_plan,
    "other blocks": written_before_its_place,
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_check_at_load_finds_a_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[name](monkeypatch)
    with pytest.raises(ModelLoadError, match=r"differs from the model run alone \(packed: \d\.\d"):
        new_runner(tiny_t5(), ReferenceAttention(BLOCK_SIZE))


def answers_differ(batch: Batch, requests: Sequence[Request]) -> bool:
    expected = [alone(tiny_t5(), each) for each in requests]
    try:
        answers = batch.run(requests)
    except (AssertionError, ValueError):
        return True
    return not all(map(same, answers, expected))


@pytest.mark.parametrize("attention", [ReferenceAttention, CompiledAttention])
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_batch_shows_a_fault(name: str, attention: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(new_runner(tiny_t5(), attention(BLOCK_SIZE)), seed=2)
    MUTATIONS[name](monkeypatch)
    requests = [replace(each, num_tokens=12) for each in requests_of(2, count=5)]
    assert answers_differ(batch, requests)


def no_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sources.AdapterRows, "of_batch", lambda _: None)


def the_first_row(patch: pytest.MonkeyPatch) -> None:
    original = sources.AdapterRows.of_batch
    patch.setattr(sources.AdapterRows, "of_batch", lambda slots: original(slots * 0 + slots[0]))


def not_placed(patch: pytest.MonkeyPatch) -> None:
    original = SourceEncoder.compute

    def compute(self: Any, stages: Any, places: Any, rows: Any) -> Any:
        return original(self, stages, [replace(each, adapter=None) for each in places], rows)

    patch.setattr(SourceEncoder, "compute", compute)


@pytest.mark.parametrize("fault", [no_rows, the_first_row, not_placed, None])
@pytest.mark.parametrize("half", ["encoder", "cross"])
def test_a_batch_shows_a_source_without_its_adapter(
    half: str, fault: Mutation | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, changed = t5_adapter(1, half=half), tiny_t5()
    merged(changed, adapter)
    runner = new_runner(tiny_t5(), ReferenceAttention(BLOCK_SIZE))
    runner.adapters.add(adapter.digest, adapter)
    plain, other = requests_of(4, count=2)
    adapted = replace(other, adapter_slot=1, adapter=adapter.digest)
    batch = Batch(runner)
    if fault is not None:
        fault(monkeypatch)
    members = [batch.start(plain), batch.start(adapted)]
    # Rows have the adapter of their slot, which no step puts there.
    batch.submit([], stages=(batch.stages(members),))
    while rows := [batch.row(each) for each in members if each.num_left]:
        note(batch.submit(rows).wait(), {each.seq_id: each for each in members})
    expected = [alone(tiny_t5(), plain), alone(changed, adapted)]
    is_same = [same(each.answer, own) for each, own in zip(members, expected, strict=True)]
    assert all(is_same) == (fault is None)
