"""The check of attention backends accepts right ones and refuses wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.backend_choice import attention_report
from mlx_parallm.worker.attention.base import LayerPool, LayerShape
from mlx_parallm.worker.attention.check import MAX_ERROR, SHAPE, attention_error, order_error
from mlx_parallm.worker.attention.reference import ReferenceAttention, ReferencePlan


class WindowIgnored(ReferenceAttention):
    def attend(self, pool: LayerPool, plan: Any, queries: mx.array, **options: Any) -> mx.array:
        changed: dict[str, Any] = options | {"window": None}
        return super().attend(pool, plan, queries, **changed)


class BiasIgnored(ReferenceAttention):
    def attend(self, pool: LayerPool, plan: Any, queries: mx.array, **options: Any) -> mx.array:
        changed: dict[str, Any] = options | {"distance_bias": None}
        return super().attend(pool, plan, queries, **changed)


class SourcesCutShort(ReferenceAttention):
    """A row of a table that an earlier row has sees one block only."""

    def plan(self, sequences: Sequence[ScheduledSequence]) -> ReferencePlan:
        tables: set[tuple[int, ...]] = set()
        cut = []
        for each in sequences:
            start = min(each.start, 15) if each.block_table in tables else each.start
            tables.add(each.block_table)
            cut.append(replace(each, start=start))
        return super().plan(cut)


class WrittenToTheWrongBlock(ReferenceAttention):
    def write(self, pool: LayerPool, plan: Any, keys: mx.array, values: mx.array) -> None:
        plan.slots = (plan.slots + 16) % pool.keys.shape[1]
        super().write(pool, plan, keys, values)


@dataclass(slots=True)
class LatePool(LayerPool):
    """Its latest write is made when it is waited for, or after the next launch of attention."""

    pending: Callable[[], None] | None = None

    def arrive(self) -> None:
        pending, self.pending = self.pending, None
        if pending is not None:
            pending()

    def arrays(self) -> list[mx.array]:
        self.arrive()
        return [self.keys, self.values]


class Late(ReferenceAttention):
    """A device that does not order a read behind the write before it, unless it is waited for."""

    def new_pool(self, shape: LayerShape, num_blocks: int) -> LatePool:
        pool = super().new_pool(shape, num_blocks)
        return LatePool(pool.keys, pool.values)

    def write(self, pool: LayerPool, plan: Any, keys: mx.array, values: mx.array) -> None:
        assert isinstance(pool, LatePool)
        pool.arrive()
        pool.pending = partial(super().write, pool, plan, keys, values)

    def attend(self, pool: LayerPool, plan: Any, queries: mx.array, **options: Any) -> mx.array:
        assert isinstance(pool, LatePool)
        output = super().attend(pool, plan, queries, **options)
        pool.arrive()
        return output


@pytest.mark.parametrize("dtype", MAX_ERROR)
@pytest.mark.parametrize("rows", [1, 5])
def test_a_read_before_the_write_shows(dtype: mx.Dtype, rows: int) -> None:
    shape = replace(SHAPE, dtype=dtype)
    # The trial with waiting writes sees nothing.
    assert attention_error(Late(16), shape) <= MAX_ERROR[dtype]
    assert order_error(Late(16), shape, rows=rows) > 2 * MAX_ERROR[dtype]
    assert order_error(ReferenceAttention(16), shape, rows=rows) <= MAX_ERROR[dtype]


@pytest.mark.parametrize("block_size", [1, 3, 5, 48])
def test_order_can_be_tried_with_every_block_size(block_size: int) -> None:
    assert order_error(ReferenceAttention(block_size), block_size=block_size, rows=2) < 1e-4


def test_the_reference_backend_agrees_with_softmax_attention() -> None:
    report = attention_report()
    assert (report.backend, report.passed) == ("reference", True)


def test_an_ignored_window_shows() -> None:
    assert attention_error(WindowIgnored(16)) > 0.1


def test_a_missing_bias_shows() -> None:
    assert attention_error(ReferenceAttention(16), has_bias=True) < 1e-4
    assert attention_error(BiasIgnored(16)) < 1e-4
    assert attention_error(BiasIgnored(16), has_bias=True) > 0.1


def test_a_source_that_is_not_seen_whole_shows() -> None:
    assert attention_error(SourcesCutShort(16)) > 0.1


def test_a_wrong_slot_shows() -> None:
    assert attention_error(WrittenToTheWrongBlock(16)) > 0.1


@pytest.mark.parametrize("block_size", [1, 3, 5, 7, 15, 17, 48])
def test_every_block_size_can_be_checked(block_size: int) -> None:
    assert attention_error(ReferenceAttention(block_size), block_size=block_size) < 1e-4
