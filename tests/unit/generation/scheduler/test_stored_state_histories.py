"""Random histories of models with a state above stores: no row runs on another prefix's state.

The simulated runner checks the state of every row's slot, see ``test_state_histories``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from mlx_parallm.config import SchedulerConfig, SpeculativeConfig
from mlx_parallm.generation.kv_cache import stored_chains
from mlx_parallm.generation.kv_cache.host_store import HostStore
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.kv_cache.saves import SaveQueue
from mlx_parallm.generation.kv_cache.stores import BlockStore
from mlx_parallm.generation.scheduler.snapshotting import Snapshotter
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from tests.dict_store import DictStore
from tests.scheduler_harness import SchedulerHarness

# NUM_HISTORIES, NUM_MUTANT: histories that must hold; those within which every fault must show.
NUM_HISTORIES, NUM_MUTANT = 40, 400
TEXTS = tuple(tuple((7 * i + 13 * text) % 47 + 1 for i in range(30)) for text in range(2))


SPECULATIVE = tuple(
    SpeculativeConfig(
        method="ngram" if model is None else "draft_model",
        model=model,
        num_speculative_tokens=3,
        prompt_lookup_min=1,
        disable_by_batch_size=4,
    )
    for model in (None, "draft")
)


class History:
    """A random order of requests, faults and restarts of a process above its stores."""

    def __init__(self, seed: int) -> None:
        self.source = source = Random(seed)
        self.store = DictStore(holds_back=source.random() < 0.5)
        self.stores: list[BlockStore] = [self.store]
        if source.random() < 0.3:
            self.stores.insert(0, HostStore(source.choice([1500, 5000, 1 << 20])))
        self.settings: dict[str, Any] = {
            "num_blocks": source.choice([10, 14, 40]),
            "has_kv": source.random() < 0.6,
            "num_snapshots": source.choice([1, 2, 3, 9]),
            "snapshot_tokens": source.choice([4, 8, 12, 100]),
            "runs_ahead": source.random() < 0.5,
            "keeps_states": source.random() < 0.5,
            "speculative": source.choice([None, None, *SPECULATIVE]),
            "config": SchedulerConfig(
                max_num_seqs=source.choice([1, 2, 4]),
                max_num_batched_tokens=source.choice([4, 9, 16, 64]),
                max_num_seqs_per_client=source.choice([None, 2]),
            ),
        }
        self.piece = source.choice([1, 2, 16])
        self.num_requests = 0
        self.seen = Counter[str]()
        self.start()

    def start(self) -> None:
        """Begin a process with an empty pool."""
        self.harness = SchedulerHarness(
            max_model_len=40, has_state=True, stores=self.stores, **self.settings
        )
        assert self.harness.tiers is not None
        self.tiers = self.harness.tiers
        self.tiers.piece = self.piece

    def run(self) -> Counter[str]:
        """Run all; return what was seen."""
        rates: dict[Callable[[], object], float] = {
            self.ask: 10,
            self.abort: 1,
            self.reset: 0.6,
            self.lose: 0.8,
            self.return_less: 0.6,
            self.pass_time: 1,
            self.harness.complete: 1,
            self.restart: 1,
        }
        for _ in range(self.source.randint(20, 60)):
            (event,) = self.source.choices([*rates], [*rates.values()])
            event()
            for _ in range(self.source.randint(0, 4)):
                is_bad = self.source.random() < 0.02
                self.harness.step(raises=is_bad, fail_rows=int(self.source.random() < 0.02))
        self.restart()
        return self.seen

    def ask(self) -> None:
        source, text = self.source, self.source.choice(TEXTS)[: self.source.randint(1, 29)]
        if source.random() < 0.3:
            text = (*text[: source.randint(1, len(text))], 3, 5, 7)
        params = SamplingParams(
            n=source.choice([1, 1, 1, 2, 3]),
            max_tokens=source.choice([None, 0, 1, 3, 8]),
            ignore_eos=source.random() < 0.5,
            prompt_logprobs=source.choice([None, None, 1]),
            prompt_logprobs_start=source.choice([0, 5, 9, 99]),
        )
        request = GenerateRequest(
            request_id=str(self.num_requests),
            model="m",
            prompt_ids=text,
            params=params,
            priority=source.randint(-1, 1),
            client=source.choice("ab"),
            cache_salt=source.choice([None, None, "salt"]),
            turn_start=source.choice([None, source.randint(0, len(text))]),
        )
        self.harness.add(request, seed=self.num_requests % 3)
        self.num_requests += 1

    def abort(self) -> None:
        if self.harness.tracked:
            self.harness.abort(self.source.choice(sorted(self.harness.tracked)))

    def reset(self) -> None:
        self.harness.settle()
        self.harness.scheduler.reset_prefix_cache(reset_running=self.source.random() < 0.5)
        if self.source.random() < 0.3:
            self.tiers.clear()

    def lose(self) -> None:
        if self.store.blocks:
            del self.store.blocks[self.source.choice(sorted(self.store.blocks))]

    def return_less(self) -> None:
        self.store.fail_after(self.source.choice([None, 0, 1, 3]))

    def pass_time(self) -> None:
        self.harness.now_s += self.source.choice([0.001, 0.1, 60.0])

    def restart(self) -> None:
        """End the process once all requests have ended, and begin another one."""
        self.harness.drain()
        moves = [batch.moves for batch in self.harness.batches]
        self.seen["saved"] += sum(len(each.saved_states) for each in moves)
        self.seen["filled"] += sum(len(each.filled_states) for each in moves)
        self.seen["filled alone"] += sum(
            bool(each.filled_states and not each.filled) for each in moves
        )
        self.seen["hit"] += sum(tier.hit_tokens for tier in self.tiers.stats().tiers)
        self.start()


def run_histories(seeds: range) -> Counter[str]:
    """Return what was seen in these histories."""
    seen = Counter[str]()
    for seed in seeds:
        try:
            seen += History(seed).run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    return seen


def check(seen: Counter[str]) -> None:
    assert all(seen[case] >= 20 for case in ("saved", "filled", "filled alone", "hit")), seen


def test_no_row_runs_on_the_state_of_another_prefix_in_a_few_histories() -> None:
    check(run_histories(range(NUM_HISTORIES)))


@pytest.mark.slow
def test_no_row_runs_on_the_state_of_another_prefix_in_many_histories() -> None:
    check(run_histories(range(NUM_HISTORIES, 1000)))


def keep_filled(self: Snapshotter, sequence: Any, content: bytes) -> None:
    """Fill a slot although the state of its last sequence is to be copied from it."""
    due, self._due = self._due, []
    KEEP_FILLED(self, sequence, content)
    self._due = due + self._due


def of_its_successor(self: SaveQueue, places: Any, *, are_states: bool = False) -> None:
    """Read snapshots in their turn, when their slots have others."""
    if not are_states:
        LEAVE(self, places)


def over_it(self: KVCacheManager, table: Any, *others: Any) -> Any:
    """Hold the snapshot that memory has of an earlier place."""
    snapshot, table.snapshot = table.snapshot, None
    try:
        return CONTINUE(self, table, *others)
    finally:
        table.snapshot = snapshot


KEEP_FILLED, LEAVE = Snapshotter.keep_filled, SaveQueue.leave
CONTINUE = KVCacheManager.continue_stored
#: FAULTS, each in place of a method or function.
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "the slot is filled before its last state is kept": (Snapshotter, "keep_filled", keep_filled),
    "saved after its slot has another": (SaveQueue, "leave", of_its_successor),
    "of every prefix": (stored_chains, "state_content", lambda root, link: root + b"state" * 3),
    "of every key": (stored_chains, "state_content", lambda _, link: b"state" * 3 + link),
    "the snapshot of memory is restored over it": (KVCacheManager, "continue_stored", over_it),
}


# RARE shows in few histories.
RARE = "the slot is filled before its last state is kept"


@pytest.mark.parametrize(
    "fault",
    [*(each for each in FAULTS if each != RARE), pytest.param(RARE, marks=pytest.mark.slow)],
)
def test_histories_show_every_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError):
        run_histories(range(NUM_MUTANT))
