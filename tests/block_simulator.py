"""A runner that keeps block contents as plain lists and samples by reading them back.

A wrong block table, a missed copy, a block reused too early or a bad prefix hit makes it read other
tokens than the sequence's own, and so choose another token than ``expected_outputs`` does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from mlx_parallm.batch import (
    PENDING_TOKEN,
    SampledToken,
    SampleSpec,
    ScheduledBatch,
    ScheduledSequence,
    StepOutput,
    TokenLogprob,
)
from mlx_parallm.request import GenerateRequest

VOCAB_SIZE = 50
END_ID = 0
# What a step that failed leaves behind.
GARBAGE = -2


class SimulatedRunner:
    """Runs batches over a store of ``num_blocks`` blocks and one token list per state slot."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        *,
        has_state: bool,
        copies: bool = False,
    ) -> None:
        self._copies = copies
        self._drafted: list[list[int]] = [[-1] * block_size for _ in range(num_blocks)]
        self._block_size = block_size
        self._blocks: list[list[int]] = [[-1] * block_size for _ in range(num_blocks)]
        self._states: list[list[int]] = [[-1] for _ in range(num_slots)]
        self._has_state = has_state
        self._chosen: dict[int, int] = {}

    def run(self, batch: ScheduledBatch, failed: frozenset[int] = frozenset()) -> StepOutput:
        """One step; the sequences in ``failed`` leave garbage behind."""
        for source, target in batch.block_copies:
            self._blocks[target] = list(self._blocks[source])
            self._drafted[target] = list(self._drafted[source])
        for source, target in batch.state_copies:
            self._states[target] = list(self._states[source])
        rows = [self._with_drafts(row) for row in batch.sequences]
        for row in rows:
            self._write(row, garbage=row.seq_id in failed)
        good = [row for row in rows if row.seq_id not in failed]
        for row in good:
            self._check_draft(row)
        chosen = {
            row.seq_id: self._choose(row, row.sample) for row in good if row.sample is not None
        }
        self._chosen = {seq_id: tokens[-1] for seq_id, tokens in chosen.items()}
        return StepOutput(
            tokens=tuple(
                SampledToken(seq_id=seq_id, token_id=token)
                for seq_id, tokens in chosen.items()
                for token in tokens
            ),
            prompt_logprobs={row.seq_id: self._score(row) for row in good if row.target_ids},
            failed=dict.fromkeys(failed, "failed"),
        )

    def _choose(self, row: ScheduledSequence, first: SampleSpec) -> list[int]:
        """The tokens that follow a row's own, as far as its proposals are right."""
        tokens, proposals = self._read(row), row.proposals
        own = len(tokens) - len(proposals)
        chosen: list[int] = []
        for accepted, spec in enumerate((first, *row.verify)):
            chosen.append(choose(tokens[: own + accepted], spec, copies=self._copies))
            if accepted < len(proposals) and chosen[-1] != proposals[accepted]:
                break
        return chosen

    def _with_drafts(self, row: ScheduledSequence) -> ScheduledSequence:
        """The row as a draft model completes it, which is right two times in three."""
        if row.draft is not None:
            self._write_draft(row, row.draft.start, row.draft.token_ids)
        if PENDING_TOKEN not in row.proposals:
            return row
        assert row.draft is not None
        assert row.sample is not None
        known = [token for block in row.block_table for token in self._drafted[block]]
        tokens = known[: row.draft.end]
        assert row.draft.end == row.start + 1
        for spec in (row.sample, *row.verify[:-1]):
            token = choose(tokens, spec, copies=self._copies) if GARBAGE not in tokens else 0
            tokens.append(token if _hash([1, *tokens]) % 3 else (token + 1) % VOCAB_SIZE)
        guesses = tuple(tokens[row.draft.end :])
        self._write_draft(row, row.draft.end, guesses[:-1])
        return replace(row, token_ids=row.token_ids[:1] + guesses)

    def _write_draft(self, row: ScheduledSequence, start: int, tokens: Sequence[int]) -> None:
        for position, token in enumerate(tokens, start):
            block = row.block_table[position // self._block_size]
            self._drafted[block][position % self._block_size] = token

    def _check_draft(self, row: ScheduledSequence) -> None:
        """The draft model must have computed what the scheduler thinks it has."""
        if row.draft is None:
            return
        stores = (self._drafted, self._blocks)
        drafted, computed = (
            [token for block in row.block_table for token in store[block]][: row.draft.end]
            for store in stores
        )
        if GARBAGE in drafted + computed:
            return
        assert drafted == computed, "a draft model's KV is not the sequence's"

    def corrupt(self, batch: ScheduledBatch) -> None:
        """What a step that raises may leave behind."""
        for row in batch.sequences:
            self._write(row, garbage=True)
            if row.draft is not None:
                self._write_draft(row, row.draft.start, [GARBAGE] * len(row.draft.token_ids))
        self._chosen = {}

    def _write(self, row: ScheduledSequence, *, garbage: bool) -> None:
        tokens = [GARBAGE] * len(row.token_ids) if garbage else row.token_ids
        if tokens == (PENDING_TOKEN,):
            # The step before may have failed: then this row is in vain.
            tokens = [self._chosen.get(row.seq_id, GARBAGE)]
        for position, token in enumerate(tokens, row.start):
            block = row.block_table[position // self._block_size]
            self._blocks[block][position % self._block_size] = token
        if row.start == 0:
            self._states[row.slot] = []
        self._states[row.slot] += tokens

    def _read(self, row: ScheduledSequence) -> list[int]:
        length = row.start + len(row.token_ids)
        tokens = [token for block in row.block_table for token in self._blocks[block]][:length]
        # A row whose token was never chosen runs in vain, on whatever a failed step left.
        if self._has_state and tokens[-1] != GARBAGE:
            assert self._states[row.slot] == tokens, "a slot holds another sequence's state"
        return tokens

    def _score(self, row: ScheduledSequence) -> tuple[TokenLogprob, ...]:
        tokens = self._read(row)
        return tuple(
            score(tokens[: row.start + offset + 1], target)
            for offset, target in enumerate(row.target_ids, row.target_start)
        )


def choose(tokens: Sequence[int], spec: SampleSpec, *, copies: bool = False) -> int:
    """The token that follows ``tokens``, as ``spec`` asks."""
    assert spec.position == len(tokens)
    return _choose(tokens, spec.seed, frozenset(spec.banned_ids), copies=copies)


def score(tokens: Sequence[int], target: int) -> TokenLogprob:
    """The log-probability of ``target`` after ``tokens``."""
    return TokenLogprob(target, -float(_hash([*tokens, target])))


def expected_outputs(
    request: GenerateRequest, index: int, seed: int, max_len: int, *, copies: bool = False
) -> list[int]:
    """The tokens of a sample that runs alone, with ``END_ID`` as the model's end."""
    params = request.params
    ends = frozenset(params.stop_token_ids) | ({END_ID} if not params.ignore_eos else set())
    tokens, outputs = list(request.prompt_ids), list[int]()
    while len(outputs) != params.max_tokens and len(tokens) < max_len:
        banned = ends if len(outputs) < params.min_tokens else frozenset[int]()
        token = _choose(tokens, seed + index, banned, copies=copies)
        tokens.append(token)
        outputs.append(token)
        if token in ends:
            break
    return outputs


def expected_prompt_logprobs(request: GenerateRequest) -> list[TokenLogprob | None]:
    """One entry per prompt token; the first is None, as are those before the first wanted."""
    prompt, start = request.prompt_ids, max(1, request.params.prompt_logprobs_start)
    return [
        score(prompt[:end], prompt[end]) if end >= start else None for end in range(len(prompt))
    ]


def _choose(tokens: Sequence[int], seed: int, banned: frozenset[int], *, copies: bool) -> int:
    """By all tokens before; with ``copies``, three times in four what followed the last one."""
    number = _hash([seed, *tokens])
    token = number % VOCAB_SIZE
    if copies and number % 4:
        places = [i for i in range(len(tokens) - 1) if tokens[i] == tokens[-1]]
        token = tokens[places[-1] + 1] if places else token
    while token in banned:
        token = (token + 1) % VOCAB_SIZE
    return token


def _hash(values: Sequence[int]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(list(values)).encode(), digest_size=4).digest())
