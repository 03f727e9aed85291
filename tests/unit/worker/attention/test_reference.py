from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention import decode_groups, dense, reference
from mlx_parallm.worker.attention.base import LayerShape
from mlx_parallm.worker.attention.decode_groups import make_decode_groups
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.row_groups import join_outputs, make_groups

SHAPE = LayerShape(num_kv_heads=2, key_dim=8, value_dim=8, dtype=mx.float32)


def scheduled(seq_id: int, start: int, length: int, *blocks: int) -> ScheduledSequence:
    return ScheduledSequence(
        seq_id=seq_id, slot=seq_id, start=start, token_ids=(1,) * length, block_table=blocks
    )


@pytest.mark.parametrize("num_blocks", [256, 8192])
def test_a_step_writes_the_pool_in_place_whatever_its_size(num_blocks: int) -> None:
    backend = ReferenceAttention(4)
    pool = backend.new_pool(SHAPE, num_blocks)
    mx.eval(pool.keys, pool.values)
    rows = mx.ones((2, 2, 1, 8))
    for start in range(3):
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        plan = backend.plan([scheduled(0, start, 1, 5), scheduled(1, start, 1, 9)])
        backend.write(pool, plan, rows, rows)
        output = backend.attend(pool, plan, rows, scale=1.0, window=None, sinks=None)
        mx.eval(output, pool.keys, pool.values)
        assert mx.get_peak_memory() - before < 64 * 1024


def test_copied_blocks_hold_what_their_sources_do() -> None:
    backend = ReferenceAttention(4)
    pool = backend.new_pool(SHAPE, 8)
    plan = backend.plan([scheduled(0, 0, 3, 2)])
    backend.write(pool, plan, mx.ones((3, 2, 1, 8)), 2 * mx.ones((3, 2, 1, 8)))
    backend.copy_blocks(pool, mx.array([2]), mx.array([6]))
    keys, values = backend.gather(pool, mx.array([[2], [6]]))
    assert mx.array_equal(keys[0], keys[1])
    assert mx.array_equal(values[0], values[1])
    assert keys.sum().item() == 2 * 3 * 2 * 8


def test_groups_put_rows_back_in_the_order_of_the_step() -> None:
    backend = ReferenceAttention(4)
    step = [scheduled(0, 5, 1, 0, 1), scheduled(1, 0, 3, 2), scheduled(2, 6, 1, 3, 4)]
    groups = make_groups(step, backend, 4, batch_decode=True)
    rows = mx.arange(10).reshape(5, 1, 2)
    parts = [group.take(rows, 5) for group in groups]
    assert [part.shape for part in parts] == [(2, 1, 2), (1, 3, 2)]
    assert mx.array_equal(join_outputs(groups, parts), rows)


def test_a_fresh_sequence_of_one_token_is_a_group_of_its_own() -> None:
    step = [scheduled(0, 5, 1, 0, 1), scheduled(1, 0, 1, 2)]
    groups = make_groups(step, ReferenceAttention(4), 4, batch_decode=True)
    assert [len(group.sequences) for group in groups] == [1, 1]


STEP = [
    # Two share blocks 0, 1 and 2; two others block 8; one has nothing in common with any.
    scheduled(0, 13, 1, 0, 1, 2, 3),
    scheduled(1, 6, 1, 8, 9),
    scheduled(2, 15, 1, 0, 1, 2, 4),
    scheduled(3, 2, 1, 12),
    scheduled(4, 4, 1, 8, 10),
    scheduled(5, 12, 1, 0, 1, 2, 5),
    scheduled(6, 0, 3, 13),
]


def test_rows_with_a_common_prefix_are_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_groups, "MIN_SAVED_TOKENS", 4)
    groups = make_decode_groups(STEP[:6], np.arange(6), 4)
    starts = {tuple(group.rows.tolist()): group.start for group in groups}
    assert starts == {(0, 2, 5): 12, (1, 4): 4, (3,): 0}


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("composed", [False, True])
def test_sharing_a_prefix_changes_nothing(
    window: int | None, has_sinks: bool, composed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "is_exp_slow", lambda: composed)
    backend = ReferenceAttention(4)
    pool = backend.new_pool(SHAPE, 16)
    pool.keys, pool.values = mx.random.normal((2, 64, 8)), mx.random.normal((2, 64, 8))
    queries = mx.random.normal((9, 4, 1, 8))
    sinks = mx.random.normal((4,)) if has_sinks else None

    def attend(min_saved: int) -> mx.array:
        monkeypatch.setattr(decode_groups, "MIN_SAVED_TOKENS", min_saved)
        plan = backend.plan(STEP)
        return backend.attend(pool, plan, queries, scale=0.3, window=window, sinks=sinks)

    assert mx.allclose(attend(4), attend(1 << 30), atol=1e-5)


@pytest.mark.parametrize("composed", [False, True])
def test_rows_in_several_groups_attend_as_in_one(
    composed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "is_exp_slow", lambda: composed)
    monkeypatch.setattr(dense, "MIN_SCORES", 1)
    backend = ReferenceAttention(4)
    pool = backend.new_pool(SHAPE, 16)
    pool.keys, pool.values = mx.random.normal((2, 64, 8)), mx.random.normal((2, 64, 8))
    # As many heads as the pool has, and twice as many.
    for heads in (2, 4):
        queries = mx.random.normal((9, heads, 1, 8))

        def attend(most: int, queries: mx.array = queries) -> tuple[int, mx.array]:
            monkeypatch.setattr(reference, "GROUP_TOKENS", most)
            plan = backend.plan(STEP)
            output = backend.attend(pool, plan, queries, scale=0.3, window=None, sinks=None)
            return len(plan.groups), output

        (number, output), (whole, wanted) = attend(16), attend(1 << 20)
        assert number > whole
        assert mx.allclose(output, wanted, atol=1e-5)
