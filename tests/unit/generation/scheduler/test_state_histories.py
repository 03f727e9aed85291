"""Random histories of models with a state: every row runs on the state after the tokens before it.

The simulated runner checks it (``SimulatedRunner``): a state has the tokens that ran in its slot,
the weights that computed them and the cache key of their request. So does ``check_integrity`` with
the slots after every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from typing_extensions import override

from mlx_parallm.config import SchedulerConfig
from mlx_parallm.generation.kv_cache.blocks import BlockTable
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.kv_cache.snapshots import StateSnapshots
from mlx_parallm.generation.scheduler.sequence import Sequence as Sample
from mlx_parallm.generation.scheduler.snapshotting import Snapshotter
from mlx_parallm.types.content import block_hash
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.types.step import ScheduledBatch, ScheduledSequence, StepOutput
from tests.block_simulator import GARBAGE, SimulatedRunner
from tests.fakes import FakeStep
from tests.scheduler_harness import evict
from tests.unit.generation.scheduler.test_versions import SPECULATIVE, TEXTS, Interleaving
from tests.version_harness import DeviceError, VersionHarness

# NUM_HISTORIES: random histories that must hold; NUM_QUICK: those of them that are run first.
NUM_HISTORIES, NUM_QUICK = 500, 100
# NUM_MUTANT: histories within which every fault must show.
NUM_MUTANT = 400


class StateHarness(VersionHarness):
    """A model with a state, of which steps, rows and snapshots can fail.

    Attributes:
        fails_wait: True if the next step raises when it is waited for.
        fails_row: True if a row of the next step fails.
        has_bad_state: True if the next snapshot that is made has a NaN.
    """

    def __init__(self, randomness: Random, config: SchedulerConfig, **options: Any) -> None:
        super().__init__(config, has_state=True, **options)
        self._random = randomness
        self._first_slot = config.max_num_seqs
        snapshots = self.kv.snapshots
        self._first_kept = self._first_slot + (snapshots.stats.num_slots if snapshots else 0)
        self.fails_wait = self.fails_row = self.has_bad_state = False
        self._latest_rows: dict[int, ScheduledSequence] = {}
        # True if the latest step leaves garbage, of which the next one may not know.
        self._leaves_garbage = False

    @override
    def _submit(self, batch: ScheduledBatch) -> FakeStep:
        self._note_restores(batch)
        is_in_vain, self._leaves_garbage = self._leaves_garbage and self.info.runs_ahead, False
        for source, _ in () if is_in_vain else batch.state_copies[: batch.num_captures]:
            assert GARBAGE not in self._simulated.state_of(source), "a failed step's state is kept"
        if not self.fails_wait:
            return super()._submit(batch)
        self.fails_wait, self._leaves_garbage = False, True
        self._simulated.corrupt(batch)

        def fail() -> None:
            raise DeviceError

        return FakeStep(StepOutput(tokens=()), fail)

    def _note_restores(self, batch: ScheduledBatch) -> None:
        slots = {row.slot: row for row in batch.sequences}
        for source, target in batch.state_copies[: batch.num_captures]:
            assert self._first_slot <= target < self._first_kept
            assert source < self._first_slot or source >= self._first_kept
        for source, target in batch.state_copies[batch.num_captures :]:
            if source >= self._first_kept:
                # What was refused is taken back, whether its sequence runs or not.
                self.seen["taken back"] += 1
                continue
            assert target in slots
            is_restored = source >= self._first_slot
            self.seen["restored"] += is_restored
            self.seen["restored in a block"] += (
                is_restored and slots[target].start % self.info.block_size > 0
            )

    @override
    def _run(self, batch: ScheduledBatch) -> StepOutput:
        failed, bad = frozenset[int](), frozenset[int]()
        if self.fails_row:
            self.fails_row, self._leaves_garbage = False, True
            failed = frozenset({self._random.choice(batch.sequences).seq_id})
            self.seen["failed row"] += 1
        if self.has_bad_state and batch.num_captures:
            self.has_bad_state = False
            copies = batch.state_copies[: batch.num_captures]
            bad = frozenset({self._random.choice(copies)[1]})
            self.seen["bad state"] += 1
        output = self._simulated.run(batch, failed, bad)
        self._spoil([source for source, target in batch.state_copies if target in bad], batch)
        return output

    def _spoil(self, slots: Sequence[int], batch: ScheduledBatch) -> None:
        """Put garbage into the KV that was computed with the states of some slots."""
        for slot in slots:
            row = self._latest_rows.get(slot)
            if row is not None:
                rest = [each for each in batch.sequences if each.seq_id != row.seq_id]
                others = {block for each in rest for block in each.block_table}
                self._simulated.spoil(row, others)
        self._latest_rows |= {row.slot: row for row in batch.sequences}


class StateHistory(Interleaving):
    """One random order of everything that may happen to a model with a state."""

    harness: StateHarness

    @override
    def make_harness(self) -> StateHarness:
        source = self.random
        return StateHarness(
            source,
            SchedulerConfig(
                max_num_seqs=source.choice([2, 4, 8]),
                max_num_batched_tokens=source.choice([6, 16, 64]),
                max_num_seqs_per_client=source.choice([None, None, 2]),
                max_loras=source.choice([1, 2, 3]),
            ),
            num_blocks=source.choice([12, 16, 20, 40]),
            num_snapshots=source.choice([1, 3, 16]),
            keeps_states=source.random() < 0.5,
            speculative=source.choice([None, *SPECULATIVE]),
            has_kv=source.random() < 0.6,
            runs_ahead=source.random() < 0.5,
            max_loaded=source.choice([2, 4]),
        )

    @override
    def events(self) -> list[tuple[Callable[[], None], float]]:
        rates: dict[Callable[[], None], float] = dict(super().events())
        rates[self.load] = 1
        rates[self.reset] = 0.2
        rates[self.fail] = 0.4
        return [
            *rates.items(),
            (self.evict_blocks, 0.5),
            (self.evict_snapshots, 0.5),
            (self.fail_wait, 0.4),
            (self.fail_row, 0.5),
            (self.spoil_state, 0.3),
        ]

    @override
    def next_request(self) -> GenerateRequest:
        request = super().next_request()
        if self.random.random() < 0.5:
            turn_start = self.random.randint(0, len(request.prompt_ids))
            request = replace(request, turn_start=turn_start)
        return request

    def evict_blocks(self) -> None:
        evict(self.harness.kv, self.random.randint(0, self.harness.kv.num_free), 0)

    def evict_snapshots(self) -> None:
        evict(self.harness.kv, 0, self.random.randint(1, 4))

    def fail_wait(self) -> None:
        self.harness.fails_wait = True

    def fail_row(self) -> None:
        self.harness.fails_row = True

    def spoil_state(self) -> None:
        self.harness.has_bad_state = True

    @override
    def run(self, num_events: int = 36) -> Counter[str]:
        seen = super().run(num_events)
        stats = self.harness.scheduler.stats()
        seen["captured"] += stats.snapshots.num_captured
        seen["evicted snapshot"] += stats.snapshots.num_evicted
        seen["preempted"] += stats.num_preemptions
        return seen


def run_histories(seeds: range) -> Counter[str]:
    """Return what was seen in these histories."""
    seen = Counter[str]()
    for seed in seeds:
        try:
            seen += StateHistory(seed).run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    return seen


@pytest.mark.parametrize(
    ("seeds", "least"),
    [
        pytest.param(range(NUM_QUICK), 4, id="few"),
        pytest.param(range(NUM_QUICK, NUM_HISTORIES), 16, id="many", marks=pytest.mark.slow),
    ],
)
def test_every_row_runs_on_the_state_after_the_tokens_before_it(seeds: range, least: int) -> None:
    seen = run_histories(seeds)
    wanted = ["cached", "restored", "restored in a block", "captured", "evicted snapshot"]
    wanted += [
        "taken back",
        "preempted",
        "failed",
        "failed row",
        "bad state",
        "straddled",
        "scored",
    ]
    assert all(seen[case] >= least for case in wanted), seen


def one_by_one(harness: StateHarness, prompts: Sequence[tuple[int, ...]]) -> None:
    """Run a request of each prompt to its end."""
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=6, ignore_eos=True, seed=1)
        harness.add(
            GenerateRequest(
                request_id=f"{number} of {len(harness.ended)}",
                model="m",
                prompt_ids=prompt,
                params=params,
            )
        )
        harness.drain()


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_state_with_a_nan_fails_its_request_and_is_not_kept(runs_ahead: bool) -> None:
    harness = StateHarness(Random(0), SchedulerConfig(), runs_ahead=runs_ahead)
    prompt = TEXTS[0][:14]
    harness.has_bad_state = True
    one_by_one(harness, [prompt])
    assert harness.seen["failed"] == 1
    assert harness.scheduler.stats().snapshots.num_used == 0
    one_by_one(harness, [prompt, prompt])
    assert harness.seen["failed"] == 1
    assert harness.scheduler.stats().prefix_hits == 12


def late(self: SimulatedRunner, batch: ScheduledBatch, *args: Any) -> StepOutput:
    """Make snapshots after the rows of the step, which are a token further."""
    captures, others = split_copies(batch)
    output = RUN(self, replace(batch, state_copies=others), *args)
    self._copy_states(captures)
    return output


def early(self: SimulatedRunner, batch: ScheduledBatch, *args: Any) -> StepOutput:
    """Make snapshots of the states with which the step before began."""
    captures, others = split_copies(batch)
    states = BEFORE.get(self, self._states)
    BEFORE[self] = {slot: list(state) for slot, state in self._states.items()}
    for source, target in captures:
        self._copy_states([(source, target)])
        self._states[target] = list(states.get(source, ()))
    return RUN(self, replace(batch, state_copies=others), *args)


def of_another_slot(self: SimulatedRunner, batch: ScheduledBatch, *args: Any) -> StepOutput:
    """Make snapshots of the slots behind those of the sequences."""
    captures, others = split_copies(batch)
    wrong = tuple((source + (source + 1 in self._states), target) for source, target in captures)
    return RUN(self, replace(batch, state_copies=(*wrong, *others)), *args)


def split_copies(batch: ScheduledBatch) -> tuple[Copies, Copies]:
    return batch.state_copies[: batch.num_captures], batch.state_copies[batch.num_captures :]


def blocks_alone(
    self: KVCacheManager, table: BlockTable, num_blocks: int, snapshots: StateSnapshots
) -> int:
    """Use cached blocks behind the latest snapshot too."""
    HOLD(self, table, num_blocks, snapshots)
    return num_blocks


def kept_though_failed(self: Snapshotter, step_id: int) -> None:
    """Let snapshots be found that a failed step made, or whose state it left."""
    self.end(step_id, ())


def a_proposal_late(
    self: Sample, row: ScheduledSequence, num_accepted: int, **options: Any
) -> None:
    """Restore the state after the first refused proposal, if that is kept."""
    later = min(num_accepted + 1, len(row.kept_slots) - 1)
    TAKE_BACK(self, row, max(later, num_accepted), **options)


def rootless(name: str) -> Callable[..., Any]:
    """Return a method of snapshots that ignores the root of contents."""
    original = getattr(StateSnapshots, name)

    def method(self: StateSnapshots, *args: Any, **options: Any) -> Any:
        short = [each[-HASH_BYTES:] if isinstance(each, bytes) else each for each in args]
        return original(self, *short, **options)

    return method


Copies = tuple[tuple[int, int], ...]
RUN, HOLD = SimulatedRunner.run, KVCacheManager._hold_snapshot
BEFORE: WeakKeyDictionary[SimulatedRunner, dict[int, list[int]]] = WeakKeyDictionary()
TAKE_BACK = Sample.take_back
LOOKUPS = ("has", "hold", "forget", "commit")
HASH_BYTES = len(block_hash(b"", (), b""))
#: FAULTS, each in place of a method.
FAULTS: dict[str, tuple[type, dict[str, Any]]] = {
    "a token late": (SimulatedRunner, {"run": late}),
    "before the step ended": (SimulatedRunner, {"run": early}),
    "of another slot": (SimulatedRunner, {"run": of_another_slot}),
    "blocks without a snapshot": (KVCacheManager, {"_hold_snapshot": blocks_alone}),
    "of a failed step": (Snapshotter, {"fail": kept_though_failed}),
    "with a NaN": (Snapshotter, {"end": lambda self, step_id, _: END(self, step_id, ())}),
    "after refused proposals": (Sample, {"take_back": lambda *_args, **_options: None}),
    "after one refused proposal": (Sample, {"take_back": a_proposal_late}),
    "of other weights or another key": (StateSnapshots, {name: rootless(name) for name in LOOKUPS}),
}
END = Snapshotter.end


@pytest.mark.parametrize("fault", FAULTS)
def test_histories_show_every_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, methods = FAULTS[fault]
    for name, method in methods.items():
        monkeypatch.setattr(owner, name, method)
    with pytest.raises(AssertionError):
        run_histories(range(NUM_MUTANT))
