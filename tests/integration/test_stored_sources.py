"""Sources that come back from stores give the tokens of those that were encoded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mlx_parallm.generation.device_runner import DeviceRunner
from mlx_parallm.generation.kv_cache.tiers import Tiers
from mlx_parallm.types.content import PendingContent
from mlx_parallm.types.request import BaseWeights, PolicyWeights
from tests.dict_store import DictStore
from tests.integration.test_parity_generate import Session
from tests.integration.test_sources_in_any_batch import (
    LENGTHS,
    RUNS,
    SMALL,
    SourceSession,
    assert_nothing_is_lost,
    differs,
    run_all,
)
from tests.source_batches import BLOCK_SIZE, NUM_BLOCKS, OneModel, new_runner, tiny_t5

#: ``PIECE``: blocks that a step fills; the longest source takes several steps.
PIECE = 40
ORDER = [(number, number % 3) for number in range(len(LENGTHS))]


class StoredSession(SourceSession):
    """A process of its own: its pool has nothing but what it computes or reads."""

    def __init__(self, name: str, store: DictStore, *, num_blocks: int = NUM_BLOCKS) -> None:
        runner = new_runner(tiny_t5(), RUNS[name](BLOCK_SIZE), num_blocks=num_blocks)
        plan: Any = SimpleNamespace(info=runner.info, prepares_shapes=False)
        worker: Any = OneModel(runner)
        self.tiers = Tiers([store], block_bytes=1, min_saved=1, min_fetched=1)
        self.tiers.piece = self.tiers.alone_piece = PIECE
        weights = PolicyWeights(BaseWeights(lasting=PendingContent("digest"), identity="identity"))
        Session.__init__(
            self,
            DeviceRunner(worker, "m", plan),
            num_blocks=num_blocks,
            budget=48,
            tiers=self.tiers,
            weights=weights,
        )


@pytest.mark.parametrize("name", RUNS)
def test_sources_come_back_in_another_process(name: str) -> None:
    store = DictStore()
    first = StoredSession(name, store)
    assert not differs(first, run_all(first, ORDER, set()), name)
    again = StoredSession(name, store)
    assert not differs(again, run_all(again, ORDER, set()), name)
    stats = again.scheduler.stats()
    assert (stats.sources_computed, stats.sources_found) == (0, len(ORDER))
    assert again.cached["r0"] == LENGTHS[0][0]
    assert_nothing_is_lost(again)


@pytest.mark.parametrize("name", RUNS)
def test_sources_that_a_small_pool_evicts_are_read(name: str) -> None:
    session = StoredSession(name, DictStore(), num_blocks=SMALL)
    numbers = run_all(session, ORDER, set())
    before = session.scheduler.stats().sources_computed
    for number in range(len(LENGTHS)):
        session.ask(f"again {number}", number)
        numbers[f"again {number}"] = number
    session.finish()
    assert not differs(session, numbers, name)
    assert session.scheduler.stats().sources_computed == before
    assert_nothing_is_lost(session)
