"""When sequences speculate, when they wait for a token, and what others lose by it."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_parallm.config import SchedulerConfig, SpeculativeConfig
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.scheduler import speculating
from mlx_parallm.generation.scheduler.scheduler import Scheduler
from mlx_parallm.generation.scheduler.updates import SequenceUpdate
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.types.events import FinishReason
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.types.step import (
    PENDING_TOKEN,
    DraftInput,
    SampledToken,
    ScheduledBatch,
    StepOutput,
)

LOOP = (1, 2, 3, 4)


class Loop:
    """A scheduler for a model that says 1, 2, 3, 4, 1, 2, ... wherever it begins.

    A sequence whose prompt is a part of it copies; one whose prompt is other tokens never does.
    ``keeps_states``: of a model with a state; None for one without.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        runs_ahead: bool = False,
        limits: dict[str, int] | None = None,
        keeps_states: bool | None = None,
        **speculative: Any,
    ) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(**(limits or {})),
            KVCacheManager(num_blocks, 4, enable_prefix_caching=keeps_states is None),
            max_model_len=128,
            has_state=keeps_states is not None,
            keeps_states=bool(keeps_states),
            speculative=SpeculativeConfig(**speculative),
        )
        self.runs_ahead = runs_ahead
        self.in_flight: ScheduledBatch | None = None
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}
        self.fresh = 1000

    def add(
        self,
        name: str,
        prompt: tuple[int, ...] = LOOP * 2,
        ends: tuple[int, ...] = (),
        **params: Any,
    ) -> None:
        request = GenerateRequest(
            request_id=name, model="m", prompt_ids=prompt, params=SamplingParams(**params)
        )
        self.scheduler.add(request, seed=0, end_ids=frozenset(ends))
        self.outputs[name] = []

    def step(self) -> ScheduledBatch | None:
        batch = self.scheduler.schedule()
        ending = batch
        if self.runs_ahead:
            ending, self.in_flight = self.in_flight, batch
        if ending is not None:
            for update in self.scheduler.update(ending, StepOutput(tokens=self.run(ending))):
                self.hear(update)
        self.scheduler.check_integrity()
        return batch

    def run(self, batch: ScheduledBatch) -> tuple[SampledToken, ...]:
        chosen = []
        for row in batch.sequences:
            if row.sample is None:
                continue
            copies = row.sample.prompt_ids[0] in LOOP
            for i in range(1 + len(row.verify)):
                self.fresh += 1
                token = LOOP[(row.sample.position + i) % 4] if copies else self.fresh
                chosen.append(SampledToken(seq_id=row.seq_id, token_id=token))
                if i < len(row.verify) and row.proposals[i] not in (token, PENDING_TOKEN):
                    break
        return tuple(chosen)

    def hear(self, update: SequenceUpdate) -> None:
        assert update.request_id not in self.ends
        if update.token is not None:
            self.outputs[update.request_id].append(update.token.token_id)
        if update.finish_reason is not None:
            self.ends[update.request_id] = update.finish_reason

    def finish(self, limit: int = 500) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work() and self.in_flight is None:
                return
            self.step()
        raise AssertionError("it does not end")


def proposals(batch: ScheduledBatch | None) -> list[int]:
    assert batch is not None
    return [len(row.verify) for row in batch.sequences]


def test_copied_text_takes_a_step_for_five_tokens() -> None:
    loop = Loop(num_speculative_tokens=4)
    loop.add("a", max_tokens=12)
    assert proposals(loop.step()) == [0]
    assert proposals(loop.step()) == [4]
    # Six tokens are known. This step's five stay within max_tokens ...
    assert proposals(loop.step()) == [4]
    # ... and the last one needs no proposal.
    assert proposals(loop.step()) == [0]
    assert loop.outputs["a"] == list(LOOP * 3)
    assert loop.ends == {"a": FinishReason.LENGTH}
    stats = loop.scheduler.stats().speculation
    assert (stats.num_drafts, stats.num_draft_tokens) == (2, 8)
    assert stats.accepted_per_position == (2, 2, 2, 2)
    assert stats.num_accepted_tokens == 8


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_tokens_after_an_end_are_dropped(runs_ahead: bool) -> None:
    loop = Loop(runs_ahead=runs_ahead)
    loop.add("end", max_tokens=50, ends=(4,))
    loop.add("stop", max_tokens=50, stop_token_ids=(3,))
    loop.add("least", max_tokens=50, stop_token_ids=(3,), min_tokens=5)
    loop.finish()
    assert loop.outputs == {"end": [1, 2, 3, 4], "stop": [1, 2, 3], "least": [1, 2, 3]}
    assert set(loop.ends.values()) == {FinishReason.STOP}


def test_tokens_before_min_tokens_are_banned_at_every_row() -> None:
    loop = Loop()
    loop.add("a", max_tokens=50, ends=(9,), min_tokens=3)
    loop.step()
    batch = loop.scheduler.schedule()
    assert batch is not None
    [row] = batch.sequences
    assert row.sample is not None
    assert [spec.banned_ids for spec in (row.sample, *row.verify)] == [(9,), (9,), (), (), ()]
    assert [spec.position for spec in (row.sample, *row.verify)] == [9, 10, 11, 12, 13]


def test_penalties_count_the_proposals_before_a_row() -> None:
    loop = Loop(num_speculative_tokens=2)
    loop.add("a", max_tokens=50, frequency_penalty=1.0)
    loop.step()
    batch = loop.scheduler.schedule()
    assert batch is not None
    [row] = batch.sequences
    assert [list(spec.output_ids) for spec in row.verify] == [[1, 2], [1, 2, 3]]


@pytest.mark.parametrize("shift", range(4))
def test_what_was_verified_is_cached_and_nothing_else(shift: int) -> None:
    loop = Loop(num_speculative_tokens=3)
    prompt = LOOP + LOOP[:shift]
    loop.add("a", prompt, max_tokens=30)
    loop.finish()
    text = (*prompt, *loop.outputs["a"])
    loop.add("b", text, max_tokens=1)
    batch = loop.step()
    assert batch is not None
    # Its last token was never computed.
    assert batch.sequences[0].start == (len(text) - 1) // 4 * 4


def test_a_request_can_do_without() -> None:
    loop = Loop()
    loop.add("a", max_tokens=8, speculative=False)
    loop.finish()
    assert loop.scheduler.stats().speculation.num_drafts == 0


def test_a_full_batch_does_not_speculate() -> None:
    loop = Loop(disable_by_batch_size=2)
    for name in "abc":
        loop.add(name, max_tokens=12)
    for _ in range(3):
        assert not any(proposals(loop.step()))
    assert loop.scheduler.abort("c")
    assert proposals(loop.step()) == [4, 4]


def test_proposals_leave_half_the_budget_to_prompts() -> None:
    loop = Loop(limits={"max_num_seqs": 2, "max_num_batched_tokens": 9})
    loop.add("a", max_tokens=40)
    loop.step()
    loop.step()
    loop.add("b", (9,) * 20, max_tokens=1)
    batch = loop.step()
    assert batch is not None
    assert [len(row.token_ids) for row in batch.sequences] == [5, 4]


def test_proposals_take_no_block_that_a_prompt_was_promised() -> None:
    loop = Loop(num_blocks=7, limits={"max_num_seqs": 2, "max_num_batched_tokens": 8})
    loop.add("a", LOOP + LOOP[:1], max_tokens=20)
    loop.step()
    loop.add("b", (9,) * 13, max_tokens=1)
    # Half of what is left of the budget; this takes a third block.
    assert proposals(loop.step()) == [3, 0]
    # Ten tokens are there and three blocks are free, which b's prompt needs.
    assert proposals(loop.step()) == [2, 0]
    loop.finish()
    assert loop.outputs["a"] == [LOOP[(5 + i) % 4] for i in range(20)]


def test_alone_it_waits_for_a_token_that_likely_begins_a_copy() -> None:
    loop = Loop(runs_ahead=True)
    loop.add("a", max_tokens=30)
    kinds = []
    while loop.scheduler.has_work():
        batch = loop.step()
        kinds.append(None if batch is None else batch.sequences[0].token_ids[0] == PENDING_TOKEN)
    # The prompt, then its first token, still unknown; then waits and drafts take turns.
    assert kinds[:2] == [False, True]
    assert kinds[2:-1] == [None, False] * (len(kinds[2:-1]) // 2)
    assert loop.outputs["a"] == [LOOP[i % 4] for i in range(30)]


def test_others_run_ahead_while_few_wait() -> None:
    loop = Loop(runs_ahead=True)
    loop.add("copies", max_tokens=60)
    for name in "xyz":
        loop.add(name, (50, 51, 52, 53), max_tokens=30)
    for _ in range(4):
        loop.step()
    sizes = []
    for _ in range(16):
        batch = loop.step()
        assert batch is not None, "a step was left out"
        others = [row for row in batch.sequences if not row.verify]
        sizes.append(len(others))
        assert len(others) >= 3
    assert loop.scheduler.stats().speculation.num_accepted_tokens > 20


def test_most_wait_together() -> None:
    loop = Loop(runs_ahead=True)
    for name in "abc":
        loop.add(name, max_tokens=60)
    loop.add("x", (50, 51, 52, 53), max_tokens=60)
    drafts = []
    while "a" not in loop.ends:
        batch = loop.step()
        if batch is not None and any(proposals(batch)):
            drafts.append(proposals(batch))
    assert all(sorted(draft) == [0, 4, 4, 4] for draft in drafts[1:-2])


def drafts(batch: ScheduledBatch | None) -> list[DraftInput | None]:
    assert batch is not None
    return [row.draft for row in batch.sequences]


def draft_loop(**options: Any) -> Loop:
    """Every token of its draft model is right."""
    return Loop(method="draft_model", model="draft", **options)


def test_a_draft_model_computes_prompts_and_what_it_lacks_of_a_draft() -> None:
    loop = draft_loop(num_speculative_tokens=3)
    loop.add("a", max_tokens=30)
    assert drafts(loop.step()) == [DraftInput(start=0, token_ids=LOOP * 2)]
    batch = loop.step()
    assert drafts(batch) == [DraftInput(start=8, token_ids=(1,))]
    assert batch is not None
    assert batch.sequences[0].token_ids == (1, *[PENDING_TOKEN] * 3)
    # It ran two of its own three tokens, and has yet to see the third and what followed.
    assert drafts(loop.step()) == [DraftInput(start=11, token_ids=(4, 1))]
    loop.finish()
    assert loop.outputs["a"] == [LOOP[i % 4] for i in range(30)]


def test_a_prefix_is_computed_anew_unless_the_draft_model_has_it() -> None:
    for allowed, start in ((True, 8), (False, 0)):
        loop = draft_loop()
        loop.add("first", LOOP * 3, max_tokens=1, speculative=allowed)
        loop.finish()
        loop.add("second", LOOP * 3, max_tokens=1)
        batch = loop.step()
        assert batch is not None
        assert batch.sequences[0].start == 8
        assert drafts(batch) == [DraftInput(start=start, token_ids=(LOOP * 3)[start:])]


def test_samples_begin_with_what_their_leader_has() -> None:
    loop = draft_loop()
    loop.add("a", LOOP * 3, max_tokens=40, n=3)
    assert drafts(loop.step()) == [DraftInput(start=0, token_ids=(LOOP * 3)[:-1])]
    batch = loop.scheduler.schedule()
    assert batch is not None
    assert [row.start for row in batch.sequences] == [11] * 3
    loop.scheduler.update(batch, StepOutput(tokens=loop.run(batch)))
    assert drafts(loop.step()) == [DraftInput(start=11, token_ids=(4, 1))] * 3


def test_penalties_keep_a_draft_model_away() -> None:
    loop = draft_loop()
    loop.add("a", max_tokens=9, presence_penalty=0.5)
    assert drafts(loop.step()) == [None]
    loop.finish()
    assert loop.scheduler.stats().speculation.num_drafts == 0


def test_after_a_crowd_the_draft_model_catches_up_before_it_proposes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(speculating, "LARGEST_LAG", 8)
    monkeypatch.setattr(speculating, "DRAFT_TOKENS", 12)
    loop = draft_loop(disable_by_batch_size=1)
    loop.add("a", max_tokens=60)
    loop.add("b", max_tokens=60)
    for _ in range(10):
        assert not any(drafts(loop.step()))
    loop.scheduler.abort("b")
    # The draft model has computed none of the 18 tokens.
    [first] = drafts(loop.step())
    assert first is not None
    assert (first.start, first.end) == (0, 12)
    [second] = drafts(loop.step())
    assert second is not None
    assert (second.start, second.end) == (12, 19)
    assert loop.scheduler.stats().speculation.num_draft_tokens == 4


def test_a_draft_model_needs_a_name_and_nothing_else_has_one() -> None:
    for values in ({"method": "draft_model"}, {"model": "m"}):
        with pytest.raises(ConfigError, match="model must"):
            SpeculativeConfig.from_mapping(values)


def test_a_text_is_no_speculative_settings() -> None:
    with pytest.raises(ConfigError, match="names with values, not 'ngram'"):
        SpeculativeConfig.from_mapping("ngram")  # type: ignore[arg-type]


def test_a_draft_model_computes_no_prompt_for_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculating, "CATCH_UP_SHARE", 4)
    for max_tokens, worth in ((3, True), (2, False)):
        loop = draft_loop()
        loop.add("a", LOOP * 3, max_tokens=max_tokens)
        assert [draft is not None for draft in drafts(loop.step())] == [worth]


def refused(loop: Loop, num_accepted: int) -> ScheduledBatch:
    """Run a step whose row has four proposals; the one after ``num_accepted`` is refused."""
    batch = loop.scheduler.schedule()
    assert batch is not None
    [row] = batch.sequences
    assert len(row.verify) == 4
    chosen = [*row.proposals[:num_accepted], 77]
    tokens = tuple(SampledToken(seq_id=row.seq_id, token_id=token) for token in chosen)
    for update in loop.scheduler.update(batch, StepOutput(tokens=tokens)):
        loop.hear(update)
    return batch


@pytest.mark.parametrize("num_accepted", range(4))
def test_a_state_is_restored_from_what_was_kept_before_the_refused_proposal(
    num_accepted: int,
) -> None:
    loop = Loop(keeps_states=True, num_speculative_tokens=4, limits={"max_num_seqs": 3})
    loop.add("a", max_tokens=40)
    loop.step()
    [row] = refused(loop, num_accepted).sequences
    # Slots 0 to 2 are those of sequences.
    assert row.kept_slots == (3, 4, 5, 6)
    batch = loop.scheduler.schedule()
    assert batch is not None
    assert batch.state_copies == ((row.kept_slots[num_accepted], row.slot),)
    [after] = batch.sequences
    assert after.start == row.start + 1 + num_accepted
    assert after.token_ids[0] == 77


def test_no_state_is_restored_where_all_proposals_are_accepted() -> None:
    loop = Loop(keeps_states=True)
    loop.add("a", max_tokens=40)
    loop.step()
    assert proposals(loop.step()) == [4]
    batch = loop.step()
    assert batch is not None
    assert batch.state_copies == ()


def test_accepted_tokens_run_again_where_only_the_state_before_is_kept() -> None:
    loop = Loop(keeps_states=False, num_speculative_tokens=4, limits={"max_num_seqs": 3})
    loop.add("a", max_tokens=40)
    loop.step()
    [row] = refused(loop, 2).sequences
    assert row.kept_slots == (3,)
    batch = loop.scheduler.schedule()
    assert batch is not None
    assert batch.state_copies == ((3, row.slot),)
    [after] = batch.sequences
    assert after.start == row.start
    # Its last token then, two accepted ones, and what followed them; it is one row of decoding.
    assert after.token_ids[:4] == (*row.token_ids[:3], 77)
    assert after.sample is not None
    assert after.sample.position == row.start + 4


def test_rows_of_tokens_that_run_again_do_not_grow_without_end() -> None:
    loop = Loop(keeps_states=False, num_speculative_tokens=4)
    loop.add("a", max_tokens=100)
    loop.step()
    lengths = []
    for _ in range(12):
        batch = loop.scheduler.schedule()
        assert batch is not None
        [row] = batch.sequences
        lengths.append(len(row.token_ids))
        chosen = [*row.proposals[:2], LOOP[len(loop.outputs["a"]) % 4]]
        chosen = chosen[: len(row.verify)] if row.verify else chosen[-1:]
        if row.verify and chosen[-1] == row.proposals[len(chosen) - 1]:
            chosen[-1] += 4
        tokens = tuple(SampledToken(seq_id=row.seq_id, token_id=token) for token in chosen)
        for update in loop.scheduler.update(batch, StepOutput(tokens=tokens)):
            loop.hear(update)
    assert max(lengths) <= 10


def test_tokens_that_run_again_leave_each_decode_row_its_token() -> None:
    loop = Loop(keeps_states=False, limits={"max_num_seqs": 4, "max_num_batched_tokens": 5})
    names = "abcd"
    for name in names:
        loop.add(name, max_tokens=20)
    for _ in range(60):
        batch = loop.step()
        assert batch is None or batch.num_tokens <= 5
    loop.finish()
    assert all(loop.outputs[name] == [LOOP[i % 4] for i in range(20)] for name in names)


def test_a_step_that_fails_ends_requests_whose_state_it_was_to_restore() -> None:
    """Check it where the sequence has no row in that step."""
    loop = Loop(keeps_states=True, limits={"max_num_seqs": 2}, num_blocks=5)
    loop.add("a", LOOP + LOOP[:1], max_tokens=12)
    loop.add("b", (9,) * 3, max_tokens=9)
    for _ in range(20):
        batch = loop.scheduler.schedule()
        assert batch is not None
        restored = {target for _, target in batch.state_copies}
        rows = {row.slot: row for row in batch.sequences}
        if restored:
            break
        tokens = tuple(
            SampledToken(seq_id=row.seq_id, token_id=88)
            for row in batch.sequences
            if row.sample is not None
        )
        for update in loop.scheduler.update(batch, StepOutput(tokens=tokens)):
            loop.hear(update)
    else:
        raise AssertionError("nothing was refused")
    updates = loop.scheduler.fail(batch, "raised")
    assert {update.request_id for update in updates} >= {"a"}, rows
    loop.scheduler.check_integrity()
