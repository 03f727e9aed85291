"""Settings of peers: what they open, and what they leave alone."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest

from mlx_parallm.config import CacheConfig, KVPeersConfig
from mlx_parallm.generation.kv_cache.opening import open_tiers
from mlx_parallm.generation.kv_cache.tiers import Tiers
from tests.kv_peers import OWNER

# NOWHERE: nobody listens there.
NOWHERE = "http://127.0.0.1:9"
ALL = KVPeersConfig(urls=(NOWHERE,), is_served=True, prefill_url=NOWHERE)


def opened(peers: KVPeersConfig, state_bytes: int = 0) -> Tiers | None:
    return open_tiers(
        CacheConfig(),
        peers,
        owner=OWNER,
        block_bytes=1000,
        state_bytes=state_bytes,
        num_models=1,
        runs_ahead=False,
    )


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "kv-peers"]


def test_without_settings_nothing_is_opened() -> None:
    assert opened(KVPeersConfig()) is None
    assert not threads()


def test_a_server_that_only_answers_asks_nobody() -> None:
    tiers = opened(KVPeersConfig(is_served=True))
    assert tiers is not None
    with closing(tiers):
        assert tiers.exports is not None
        assert tiers.exports.owner == OWNER
        assert not tiers.own_stores
        assert tiers.room == float("inf")
        assert not tiers.lacks(b"x" * 32)
        assert not threads()


def test_all_settings_together_end_with_their_threads() -> None:
    tiers = opened(ALL)
    assert tiers is not None
    with closing(tiers):
        assert len(threads()) == 2
        assert [tier.tier for tier in tiers.stats().tiers] == ["peer"]
        assert tiers.stats().prefill is not None
        # Nobody answers, so nothing is found.
        assert not tiers.find([b"x" * 32])
    assert not threads()


def test_a_model_with_a_state_has_no_peers(caplog: pytest.LogCaptureFixture) -> None:
    assert opened(ALL, state_bytes=100) is None
    assert "a model that keeps a state" in caplog.text
    assert not threads()
