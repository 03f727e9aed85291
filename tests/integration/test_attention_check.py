"""The check of attention backends accepts right ones and refuses wrong ones."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm.worker.attention.backend_choice import attention_report
from mlx_parallm.worker.attention.base import LayerPool
from mlx_parallm.worker.attention.check import attention_error
from mlx_parallm.worker.attention.reference import ReferenceAttention


class WindowIgnored(ReferenceAttention):
    def attend(self, pool: LayerPool, plan: Any, queries: mx.array, **options: Any) -> mx.array:
        changed: dict[str, Any] = options | {"window": None}
        return super().attend(pool, plan, queries, **changed)


class WrittenToTheWrongBlock(ReferenceAttention):
    def write(self, pool: LayerPool, plan: Any, keys: mx.array, values: mx.array) -> None:
        plan.slots = (plan.slots + 16) % pool.keys.shape[1]
        super().write(pool, plan, keys, values)


def test_the_reference_backend_agrees_with_softmax_attention() -> None:
    report = attention_report()
    assert (report.backend, report.passed) == ("reference", True)


def test_an_ignored_window_shows() -> None:
    assert attention_error(WindowIgnored(16)) > 0.1


def test_a_wrong_slot_shows() -> None:
    assert attention_error(WrittenToTheWrongBlock(16)) > 0.1


@pytest.mark.parametrize("block_size", [1, 3, 5, 7, 15, 17, 48])
def test_every_block_size_can_be_checked(block_size: int) -> None:
    assert attention_error(ReferenceAttention(block_size), block_size=block_size) < 1e-4
