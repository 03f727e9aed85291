"""Reads over a link of which it is soon seen that it is too slow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from mlx_parallm.generation.kv_cache.fetches import LEAST_LOOK_S, ChainFetch, FetchQueue, Run
from mlx_parallm.generation.kv_cache.peer.peers import PeerFetch
from tests.dict_store import DictStore
from tests.kv_disk import chain, contents, data

BLOCKS = chain("pace", 100, 10)
COMPUTE_S = 4.0


class SteadyStore(DictStore):
    """A store whose fetches get blocks when a test says so."""

    gives_parts = is_steady = True

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[PeerFetch] = []

    def fetch(self, contents: Sequence[bytes]) -> Any:
        del contents
        self.reads.append(PeerFetch())
        return self.reads[-1]


class Link:
    """A queue of fetches, and blocks that come at a pace."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.store = SteadyStore()
        self.queue = FetchQueue(10, lambda: self.now_s)
        self.queue.computing.observe(100, COMPUTE_S)

    def begin(self) -> ChainFetch | None:
        return self.queue.add([Run(self.store, contents(BLOCKS))], 100)

    def run(self, fetch: ChainFetch, read_s: float) -> float:
        """Let blocks come until the fetch is awaited no longer; return how long that took."""
        begin_s, read = self.now_s, self.store.reads[-1]
        while fetch.is_awaited(0):
            due_in_s = self.queue.due_in_s
            assert due_in_s is not None
            self.now_s += min(0.1, max(due_in_s, 0.001))
            count = int(100 * min(1.0, (self.now_s - begin_s) / read_s))
            read.blocks[:] = data(BLOCKS)[:count]
            read.is_done = count == 100
            self.queue.note_done()
        self.arrived = self.queue.take(fetch)
        self.queue.release(fetch)
        return self.now_s - begin_s


@pytest.mark.parametrize("read_s", [0.5, 2.0, 3.8])
def test_a_link_that_pays_is_awaited(read_s: float) -> None:
    link = Link()
    fetch = link.begin()
    assert fetch is not None
    assert link.run(fetch, read_s) == pytest.approx(read_s, abs=0.15)
    assert len(link.arrived) == 100
    assert link.begin() is not None


@pytest.mark.parametrize("read_s", [4.5, 6.4, 60.0])
def test_a_link_that_does_not_pay_costs_little_once(read_s: float) -> None:
    link = Link()
    fetch = link.begin()
    assert fetch is not None
    assert link.run(fetch, read_s) <= LEAST_LOOK_S + 0.2
    # What has come by then is used.
    assert len(link.arrived) == pytest.approx(100 * LEAST_LOOK_S / read_s, abs=5)
    assert link.begin() is None


def test_a_link_that_breaks_off_is_given_up() -> None:
    link = Link()
    fetch = link.begin()
    assert fetch is not None
    (read,) = link.store.reads
    link.now_s = 1.0
    read.blocks.extend(data(BLOCKS)[:50])
    link.queue.note_done()
    link.now_s = 3.9
    assert fetch.is_awaited(0)
    link.now_s = 4.1
    assert not fetch.is_awaited(0)
    assert len(link.queue.take(fetch)) == 50
