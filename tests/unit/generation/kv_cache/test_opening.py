"""Where a model's prefixes are kept, as the settings say."""

from __future__ import annotations

import logging

import pytest

from mlx_parallm.config import CacheConfig
from mlx_parallm.generation.kv_cache.budget import KVShare
from mlx_parallm.generation.kv_cache.opening import make_snapshots
from mlx_parallm.types.step import KVPlan, RunnerInfo


def info_of(state_bytes: int, *, has_state: bool, path: str = "split") -> RunnerInfo:
    return RunnerInfo(
        path=path,
        vocab_size=9,
        max_model_len=64,
        num_blocks=40,
        block_size=16,
        kv_bytes=4000,
        weight_bytes=1,
        has_state=has_state,
        attention_backend="reference",
        dtype="float32",
        state_bytes=state_bytes,
    )


@pytest.mark.parametrize(
    ("state_bytes", "has_state", "limit", "num_slots", "message"),
    [
        (100, True, None, 5, ""),
        (100, True, 250, 2, ""),
        (100, True, 99, 0, "does not hold one of 100 bytes"),
        (100, True, 0, 0, "does not hold one of 100 bytes"),
        (0, True, 250, 0, "caches of an unknown kind"),
        (0, False, 250, 0, "m keeps no state, so it ignores --state-cache-memory"),
        (0, False, None, 0, ""),
    ],
)
def test_a_setting_that_keeps_no_states_is_said_once(
    state_bytes: int,
    limit: int | None,
    num_slots: int,
    message: str,
    caplog: pytest.LogCaptureFixture,
    *,
    has_state: bool,
) -> None:
    share = KVShare("m", KVPlan(16, 100, 80, 64, state_bytes=state_bytes), 40)
    info = info_of(state_bytes, has_state=has_state)
    cache = CacheConfig(state_cache_bytes=limit)
    with caplog.at_level(logging.WARNING):
        snapshots = make_snapshots(share.with_snapshots(limit), info, cache, 4)
    assert (0 if snapshots is None else snapshots.stats.num_slots) == num_slots
    assert [message in each for each in caplog.messages] == [True] * bool(message)
