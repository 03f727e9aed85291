"""The KV memory that a model asks for."""

from __future__ import annotations

import pytest

from mlx_parallm.config import CacheConfig, SchedulerConfig
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.load.memory import plan_kv


@pytest.mark.parametrize(
    ("max_source_len", "blocks_per_sequence"), [(0, 3), (1, 4), (16, 4), (100, 10)]
)
def test_every_sequence_has_room_for_its_source(
    max_source_len: int, blocks_per_sequence: int
) -> None:
    cache, scheduler = CacheConfig(block_size=16), SchedulerConfig(max_num_seqs=2)
    plan = plan_kv((), {}, cache, scheduler, 40, ReferenceAttention(16), max_source_len)
    assert plan.wanted_blocks == 2 * blocks_per_sequence
    assert plan.max_model_len == 40
