"""Random histories of sources over stores: each request gets what it gets alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

from mlx_parallm.generation.kv_cache.host_store import HostStore
from mlx_parallm.generation.kv_cache.stores import BlockStore
from tests.dict_store import DictStore
from tests.kv_disk import Disk
from tests.source_harness import SourceHarness
from tests.unit.generation.scheduler.test_stored_mixes import tear
from tests.unit.generation.scheduler.test_stored_sources import (
    LONG,
    OTHER,
    PROMPT,
    SOURCE,
    count_hits,
    process,
)


class Mix:
    """Processes one after the other over one store, whose requests are few and often repeated."""

    def __init__(self, seed: int) -> None:
        self.source = Random(seed)
        self.store = DictStore(holds_back=self.source.random() < 0.7)
        self.seen = Counter[str]()

    def run(self) -> Counter[str]:
        for _ in range(3):
            self._run_process()
        return self.seen

    def _run_process(self) -> None:
        source = self.source
        harness = process(
            self.store,
            num_blocks=source.choice([36, 60]),
            stall_ms=source.choice([None, 4.0]),
            runs_ahead=source.random() < 0.5,
        )
        assert harness.tiers is not None
        harness.tiers.piece, harness.tiers.alone_piece = source.choice([(16, 64), (2, 5)])
        for number in range(14):
            self._act(harness, f"{number}")
            for _ in range(source.randint(0, 5)):
                harness.step(raises=source.random() < 0.06)
                self._turn(harness)
        harness.drain()
        assert not harness.cache.tables()
        assert not harness.scheduler._running.source_fetches()
        stats = harness.scheduler.stats()
        assert stats.prefix_queries - stats.prefix_hits >= count_hits(harness)
        self.seen["hits"] += count_hits(harness)
        self.seen["filled"] += harness.sources.num_filled
        self.seen["encoded"] += harness.sources.num_encoded
        self.seen["preempted"] += stats.num_preemptions

    def _turn(self, harness: SourceHarness) -> None:
        event = self.source.random()
        if event < 0.3:
            self.store.complete()
        elif event < 0.35:
            harness.now_s += self.source.choice([0.01, 60.0])
        elif event < 0.4 and self.store.blocks:
            del self.store.blocks[self.source.choice(list(self.store.blocks))]
        elif event < 0.45:
            self.store.fail_after(self.source.choice([None, None, 0, 2, 7]))

    def _act(self, harness: SourceHarness, name: str) -> None:
        source, event = self.source, self.source.random()
        if event < 0.75:
            harness.add_source(
                name,
                source.choice([SOURCE, LONG, OTHER, (7,)]),
                PROMPT[: source.choice([1, 1, 9, 23])],
                n=source.choice([1, 1, 2, 3]),
                max_tokens=source.choice([0, 3, 20]),
                cache_salt=source.choice(["", "", "", "s"]),
            )
        elif event < 0.85 and harness.tracked:
            harness.abort(source.choice(sorted(harness.tracked)))
        elif event < 0.9:
            harness.settle()
            harness.scheduler.reset_prefix_cache(reset_running=source.random() < 0.5)
            if source.random() < 0.2 and harness.tiers is not None:
                harness.tiers.clear()
        elif event < 0.95:
            harness.settle()
            harness.scheduler.recompute_running()


def test_every_history_over_stores_gives_what_each_request_gets_alone() -> None:
    seen = sum((Mix(seed).run() for seed in range(30)), Counter[str]())
    assert min(seen[name] for name in ("hits", "filled", "encoded", "preempted")) > 50


def run_over_a_folder(source: Random, disk: Disk) -> SourceHarness:
    """Run a process over a folder whose files are damaged, and end or kill it."""
    store = disk.open(40_000)
    stores: list[BlockStore] = [store]
    if source.random() < 0.4:
        stores.insert(0, HostStore(source.choice([2_000, 1 << 20])))
    harness = SourceHarness(stores=stores, num_blocks=source.choice([36, 60]))
    for number in range(12):
        harness.add_source(
            f"{number}",
            source.choice([SOURCE, LONG, OTHER, (7,)]),
            PROMPT[: source.choice([1, 9, 23])],
            max_tokens=source.choice([0, 3]),
        )
        for _ in range(source.randint(0, 6)):
            harness.step(raises=source.random() < 0.04)
            disk.clock.pass_s(source.choice([0.0, 0.1, 0.6]))
            store.turn()
        if source.random() < 0.1:
            tear(source, disk)
    while harness.scheduler.has_work():
        harness.step()
        disk.clock.pass_s(0.1)
        store.turn()
    harness.drain()
    if source.random() < 0.3:
        disk.kill(store)
    else:
        store.close()
    return harness


def test_sources_over_folders_that_are_damaged(tmp_path: Path) -> None:
    seen = Counter[str]()
    for seed in range(10):
        disk, source = Disk(tmp_path / str(seed)), Random(seed)
        for _ in range(4):
            harness = run_over_a_folder(source, disk)
            seen["filled"] += harness.sources.num_filled
            seen["encoded"] += harness.sources.num_encoded
            tear(source, disk)
    assert min(seen["filled"], seen["encoded"]) > 50
