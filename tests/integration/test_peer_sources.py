"""Sources of an encoder-decoder that come from a peer give the tokens of encoded ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mlx_parallm.generation.device_runner import DeviceRunner
from mlx_parallm.generation.kv_cache.peer.exports import Exports
from mlx_parallm.generation.kv_cache.peer.peers import Peers
from mlx_parallm.generation.kv_cache.stores import BlockStore
from mlx_parallm.generation.kv_cache.tiers import Tiers
from mlx_parallm.types.content import PendingContent
from mlx_parallm.types.request import BaseWeights, PolicyWeights
from tests.integration.test_parity_generate import Session
from tests.integration.test_peer_prefixes import NowStore
from tests.integration.test_sources_in_any_batch import (
    LENGTHS,
    RUNS,
    SourceSession,
    assert_nothing_is_lost,
    differs,
    run_all,
)
from tests.kv_peers import OWNER, ExportLink, listed
from tests.source_batches import BLOCK_SIZE, NUM_BLOCKS, OneModel, new_runner, tiny_t5

ORDER = [(number, number % 3) for number in range(len(LENGTHS))]


class PeerSession(SourceSession):
    """A process of its own, which answers peers."""

    def __init__(self, name: str, *stores: BlockStore) -> None:
        runner = new_runner(tiny_t5(), RUNS[name](BLOCK_SIZE), num_blocks=NUM_BLOCKS)
        self.block_bytes = runner._blocks.block_bytes
        plan: Any = SimpleNamespace(info=runner.info, prepares_shapes=False)
        worker: Any = OneModel(runner)
        self.exports = Exports(OWNER, 1)
        self.tiers = Tiers(stores, block_bytes=1, exports=self.exports, min_saved=1, min_fetched=1)
        weights = PolicyWeights(BaseWeights(lasting=PendingContent("digest"), identity="identity"))
        Session.__init__(
            self,
            DeviceRunner(worker, "m", plan),
            num_blocks=NUM_BLOCKS,
            budget=48,
            tiers=self.tiers,
            weights=weights,
        )

    def serve(self) -> None:
        self.tiers.answer_peers()
        self.step()


def beside(first: PeerSession, name: str) -> PeerSession:
    link = ExportLink(first.exports, first.serve)
    return PeerSession(name, NowStore(Peers(listed(link), OWNER, first.block_bytes)))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "runs ahead")) for name in RUNS]
)
def test_sources_come_from_a_peer(name: str) -> None:
    first = PeerSession(name)
    assert not differs(first, run_all(first, ORDER, set()), name)
    second = beside(first, name)
    assert not differs(second, run_all(second, ORDER, set()), name)
    stats = second.scheduler.stats()
    assert (stats.sources_computed, stats.sources_found) == (0, len(ORDER))
    assert second.cached["r0"] == LENGTHS[0][0]
    assert_nothing_is_lost(second)


def test_a_source_that_a_peer_has_in_part_is_encoded() -> None:
    name = next(iter(RUNS))
    first = PeerSession(name)
    run_all(first, ORDER, set())
    for content in first.kv._pool.contents()[::3]:
        block = first.kv._pool.find(content)
        assert block is not None
        first.kv._pool.forget(block)
    second = beside(first, name)
    assert not differs(second, run_all(second, ORDER, set()), name)
    assert second.scheduler.stats().sources_computed > 0
    assert_nothing_is_lost(second)
