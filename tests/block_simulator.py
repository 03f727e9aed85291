"""A runner that keeps block contents as plain lists and samples by reading them back.

A wrong block table, a missed copy, a block reused too early or a bad prefix hit makes it read other
tokens than the sequence's own, and so choose another token than ``expected_outputs`` does. Each
position remembers which weights computed it, and tokens depend on the weights that choose them.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mlx_parallm.types.request import ADJUSTED_LOGPROBS, GenerateRequest
from mlx_parallm.types.step import (
    PENDING_TOKEN,
    SampledToken,
    SampleSpec,
    ScheduledBatch,
    ScheduledSequence,
    StepOutput,
    TokenLogprob,
)
from tests.beam_reference import reference_beams

VOCAB_SIZE = 50
END_ID = 0
# What a step that failed leaves behind.
GARBAGE = -2
# The weights of a model that never changes, without an adapter.
PLAIN = "/"


@dataclass(frozen=True)
class Choice:
    """The weights that chose a token, and those that computed what its row read."""

    content: str
    read: frozenset[str]


class SimulatedRunner:
    """Runs batches over a store of ``num_blocks`` blocks and one token list per state slot.

    The state of a slot is the list of all tokens that ran in it. Every row checks that these are
    the tokens before it, which requests with one cache key have computed.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        *,
        has_state: bool,
        has_kv: bool = True,
        keeps_states: bool = False,
        copies: bool = False,
    ) -> None:
        """Begin with garbage everywhere.

        Args:
            num_blocks: the blocks of the pool.
            block_size: the tokens of a block.
            num_slots: the slots of states, those of snapshots included.
            has_state: True if the model keeps a state per sequence.
            has_kv: False if it keeps nothing else: blocks that were found hold nothing.
            keeps_states: True if rows keep the state before each of their proposals.
            copies: True if the model often repeats what followed its last token before.
        """
        self._copies = copies
        self._has_kv = has_kv
        self._drafted: list[list[int]] = [[-1] * block_size for _ in range(num_blocks)]
        self._block_size = block_size
        self._blocks: list[list[int]] = [[-1] * block_size for _ in range(num_blocks)]
        self._states: dict[int, list[int]] = {slot: [-1] for slot in range(num_slots)}
        self._has_state = has_state
        self._keeps_states = keeps_states
        # The step in which a row with proposals kept a state, by slot.
        self._kept_at: dict[int, int] = {}
        self._num_steps = 0
        self._chosen: dict[int, int] = {}
        self._block_contents = [[PLAIN] * block_size for _ in range(num_blocks)]
        self._state_contents: dict[int, set[str]] = {slot: set() for slot in range(num_slots)}
        self._state_keys: dict[int, set[Hashable]] = {slot: set() for slot in range(num_slots)}
        # Slots whose state was copied or filled since their sequence ran.
        self._restored: set[int] = set()
        #: The cache key of a sequence, by its number.
        self.key_of: Callable[[int], Hashable] = lambda seq_id: None
        self._adapters: dict[int, str] = {}
        #: The content of the model's own weights; may change between two steps.
        self.base = ""
        #: By sequence and position.
        self.choices: dict[tuple[int, int], Choice] = {}

    def content_of(self, row: ScheduledSequence) -> str:
        """Return the weights that compute a row of the latest batch."""
        adapter = self._adapters[row.adapter_slot] if row.adapter_slot else ""
        return f"{self.base}/{adapter}"

    def state_of(self, slot: int) -> Sequence[int]:
        """Return the tokens that ran in a slot."""
        return self._states[slot]

    def run(
        self,
        batch: ScheduledBatch,
        failed: frozenset[int] = frozenset(),
        bad_slots: frozenset[int] = frozenset(),
    ) -> StepOutput:
        """One step; the sequences in ``failed`` and ``bad_slots`` leave garbage behind."""
        self._adapters.update(batch.adapters)
        saved = self._move(batch)
        self._copy(batch)
        for slot in bad_slots:
            self._states[slot] = [GARBAGE]
        for row in batch.sequences:
            self._check_state(row)
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
                SampledToken(
                    seq_id=row.seq_id, token_id=token, logprob=self._likeliest(row, row.sample)
                )
                for row in good
                if row.sample is not None
                for token in chosen[row.seq_id]
            ),
            prompt_logprobs={row.seq_id: self._score(row) for row in good if row.target_ids},
            failed=dict.fromkeys(failed, "failed"),
            saved=saved,
            bad_slots=tuple(bad_slots),
        )

    def _check_state(self, row: ScheduledSequence) -> None:
        """Check that a row's slot has the state after the tokens before it."""
        if not (self._has_state and row.start):
            return
        before = self._tokens_of(row)[: row.start]
        # A row runs in vain behind a step that failed.
        if GARBAGE not in before and GARBAGE not in self._states[row.slot]:
            assert self._states[row.slot] == before, "a slot holds another state"
            assert self._state_keys[row.slot] == {self.key_of(row.seq_id)}, "of another cache key"

    def _move(self, batch: ScheduledBatch) -> tuple[tuple[bytes, bytes], ...]:
        """Read saved blocks, then fill others; return what was read."""
        moves = batch.moves
        saved = [(content, self._bytes_of(block)) for block, content in moves.saved]
        saved += [(content, self._state_bytes(slot)) for slot, content in moves.saved_states]
        assert len({block for block, _ in batch.moves.filled}) == len(batch.moves.filled)
        for block, data in batch.moves.filled:
            tokens, drafted, contents = json.loads(bytes(data))
            self._blocks[block], self._drafted[block] = tokens, drafted
            self._block_contents[block] = contents
        for slot, data in moves.filled_states:
            parts = self._states, self._state_contents, self._state_keys
            for store, part in zip(parts, pickle.loads(data), strict=True):
                store[slot] = part
        self._restored.update(slot for slot, _ in moves.filled_states)
        return tuple(saved)

    def _state_bytes(self, slot: int) -> bytes:
        parts = self._states, self._state_contents, self._state_keys
        return pickle.dumps([store[slot] for store in parts])

    def _bytes_of(self, block: int) -> bytes:
        stores = (self._blocks, self._drafted, self._block_contents)
        return json.dumps([store[block] for store in stores]).encode()

    def _copy(self, batch: ScheduledBatch) -> None:
        for source, target in batch.block_copies:
            for store in (self._blocks, self._drafted):
                store[target] = list(store[source])
            self._block_contents[target] = list(self._block_contents[source])
        kept = self._kept_at.keys()
        self._copy_states(batch.state_copies)
        # Batches that only move blocks are no steps.
        self._num_steps += bool(batch.sequences)
        self._restored.update(target for source, target in batch.state_copies if source not in kept)
        for row in batch.sequences:
            if row.slot in self._restored and row.start and not self._has_kv:
                self._fill_blocks(row)
            self._restored.discard(row.slot)

    def _copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            kept_at = self._kept_at.get(source, self._num_steps)
            assert self._num_steps - kept_at < 2, "a state was kept too long ago"
            self._states[target] = list(self._states[source])
            self._state_contents[target] = set(self._state_contents[source])
            self._state_keys[target] = set(self._state_keys[source])

    def _fill_blocks(self, row: ScheduledSequence) -> None:
        """Let the blocks of a restored row have what its state has."""
        state = self._states[row.slot]
        if GARBAGE in state:
            state = [GARBAGE] * row.start
        assert len(state) == row.start, "a state of another length"
        (content,) = self._state_contents[row.slot] or {PLAIN}
        for position, token in enumerate(state):
            block, offset = divmod(position, self._block_size)
            self._blocks[row.block_table[block]][offset] = token
            self._block_contents[row.block_table[block]][offset] = content

    def _choose(self, row: ScheduledSequence, first: SampleSpec) -> list[int]:
        """Return the tokens that follow a row's own, as far as its proposals are right."""
        tokens, proposals = self._read(row), row.proposals
        own = len(tokens) - len(proposals)
        content = self.content_of(row)
        choice = Choice(content, self._read_contents(row))
        chosen: list[int] = []
        for accepted, spec in enumerate((first, *row.verify)):
            self.choices[row.seq_id, spec.position] = choice
            chosen.append(
                choose(tokens[: own + accepted], spec, copies=self._copies, content=content)
            )
            if accepted < len(proposals) and chosen[-1] != proposals[accepted]:
                break
        return chosen

    def _likeliest(self, row: ScheduledSequence, spec: SampleSpec) -> TokenLogprob | None:
        """Return what a beam's row reports: the likeliest tokens after all tokens before."""
        params = spec.params
        if params.logprobs_mode != ADJUSTED_LOGPROBS or params.logprobs is None:
            return None
        assert PENDING_TOKEN not in row.token_ids, "a beam does not know its tokens"
        logprobs = beam_logprobs(self._read(row), self.content_of(row))
        allowed = params.allowed_token_ids or range(VOCAB_SIZE)
        banned = () if params.allowed_token_ids else spec.banned_ids
        best = sorted(set(allowed) - set(banned), key=lambda token: -logprobs[token])
        top = tuple((token, float(logprobs[token])) for token in best[: params.logprobs])
        return TokenLogprob(best[0], float(logprobs[best[0]]), top)

    def _with_drafts(self, row: ScheduledSequence) -> ScheduledSequence:
        """Return the row as a draft model completes it, which is right two times in three."""
        if row.draft is not None:
            self._write_draft(row, row.draft.start, row.draft.token_ids)
        if PENDING_TOKEN not in row.proposals:
            return row
        assert row.draft is not None
        assert row.sample is not None
        known = [token for block in row.block_table for token in self._drafted[block]]
        tokens = known[: row.draft.end]
        assert row.draft.end == row.start + len(row.token_ids) - len(row.verify)
        content = self.content_of(row)
        for spec in (row.sample, *row.verify[:-1]):
            token = 0
            if GARBAGE not in tokens:
                token = choose(tokens, spec, copies=self._copies, content=content)
            tokens.append(token if _hash([1, *tokens]) % 3 else (token + 1) % VOCAB_SIZE)
        guesses = tuple(tokens[row.draft.end :])
        self._write_draft(row, row.draft.end, guesses[:-1])
        return replace(row, token_ids=row.token_ids[: -len(guesses)] + guesses)

    def _write_draft(self, row: ScheduledSequence, start: int, tokens: Sequence[int]) -> None:
        for position, token in enumerate(tokens, start):
            block = row.block_table[position // self._block_size]
            self._drafted[block][position % self._block_size] = token

    def _check_draft(self, row: ScheduledSequence) -> None:
        """Check that the draft model has computed what the scheduler thinks it has."""
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
        """Write what a failed step may leave behind."""
        self._adapters.update(batch.adapters)
        self._num_steps += bool(batch.sequences)
        for block, _ in batch.moves.filled:
            self._blocks[block] = [GARBAGE] * self._block_size
            self._drafted[block] = [GARBAGE] * self._block_size
        targets = [target for _, target in batch.state_copies]
        for slot in [*targets, *(slot for slot, _ in batch.moves.filled_states)]:
            self._states[slot] = [GARBAGE]
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
        content = self.content_of(row)
        for position, token in enumerate(tokens, row.start):
            block = row.block_table[position // self._block_size]
            self._blocks[block][position % self._block_size] = token
            self._block_contents[block][position % self._block_size] = content
        if row.start == 0:
            self._states[row.slot], self._state_contents[row.slot] = [], set()
            self._state_keys[row.slot] = set()
        key = self.key_of(row.seq_id)
        self._keep(row, tokens, content, key)
        self._states[row.slot] += tokens
        self._state_contents[row.slot].add(content)
        self._state_keys[row.slot].add(key)

    def _keep(
        self, row: ScheduledSequence, tokens: Sequence[int], content: str, key: Hashable
    ) -> None:
        """Keep the states before a row's proposals, or that before the row."""
        first = len(tokens) - len(row.verify) if self._keeps_states else 0
        for count, slot in enumerate(row.kept_slots, first):
            self._kept_at[slot] = self._num_steps
            self._states[slot] = [*self._states[row.slot], *tokens[:count]]
            self._state_contents[slot] = self._state_contents[row.slot] | set([content][:count])
            self._state_keys[slot] = self._state_keys[row.slot] | set([key][:count])

    def spoil(self, row: ScheduledSequence, others: Collection[int]) -> None:
        """Put garbage into what a row has written, but for blocks that others have."""
        for position in range(row.start, row.start + len(row.token_ids)):
            block = row.block_table[position // self._block_size]
            if block not in others:
                self._blocks[block][position % self._block_size] = GARBAGE

    def _tokens_of(self, row: ScheduledSequence) -> list[int]:
        return [token for block in row.block_table for token in self._blocks[block]]

    def _read(self, row: ScheduledSequence) -> list[int]:
        tokens = self._tokens_of(row)[: row.start + len(row.token_ids)]
        # A row behind a failed step runs in vain, on whatever that left.
        if self._has_state and GARBAGE in self._states[row.slot]:
            return [GARBAGE] * len(tokens)
        if self._has_state and GARBAGE not in tokens:
            assert self._states[row.slot] == tokens, "a slot holds another sequence's state"
        return tokens

    def _read_contents(self, row: ScheduledSequence) -> frozenset[str]:
        """Return the weights that computed all that a row reads."""
        if self._has_state:
            return frozenset(self._state_contents[row.slot])
        length = row.start + len(row.token_ids)
        contents = [content for block in row.block_table for content in self._block_contents[block]]
        return frozenset(contents[:length])

    def _score(self, row: ScheduledSequence) -> tuple[TokenLogprob, ...]:
        tokens, content = self._read(row), self.content_of(row)
        assert self._read_contents(row) == {content}, "a prompt is scored by two versions"
        return tuple(
            score(tokens[: row.start + offset + 1], target, content)
            for offset, target in enumerate(row.target_ids, row.target_start)
        )


def choose(
    tokens: Sequence[int], spec: SampleSpec, *, copies: bool = False, content: str = PLAIN
) -> int:
    """Return the token that follows ``tokens``, by ``spec`` and the weights."""
    assert spec.position == len(tokens)
    if spec.params.allowed_token_ids:
        (forced,) = spec.params.allowed_token_ids
        return forced
    return choose_token(
        tokens, spec.seed, frozenset(spec.banned_ids), copies=copies, content=content
    )


def beam_logprobs(tokens: Sequence[int], content: str = PLAIN) -> np.ndarray:
    """Return the log-probabilities of the next token, float64 ``[VOCAB_SIZE]``."""
    seed = _hash([2, *_marked(content), *tokens])
    logits = np.random.RandomState(seed).standard_normal(VOCAB_SIZE) * 2
    return np.array(logits - np.log(np.exp(logits).sum()))


def repeating(tokens: Sequence[int], size: int) -> set[int]:
    """Return the tokens that would complete a run of ``size`` tokens that is there already."""
    if not size:
        return set()
    last = tuple(tokens[len(tokens) - size + 1 :])
    runs = (tuple(tokens[start : start + size]) for start in range(len(tokens) - size + 1))
    return {run[-1] for run in runs if run[:-1] == last}


def expected_beams(
    request: GenerateRequest, max_tokens: int, content: str = PLAIN
) -> list[tuple[tuple[int, ...], float]]:
    """Return the hypotheses of a request that runs alone, with ``END_ID`` as the model's end."""
    params = request.params
    assert params.beams is not None
    ends = frozenset(params.stop_token_ids) | ({END_ID} if not params.ignore_eos else set())

    def logprobs_of(output: tuple[int, ...]) -> np.ndarray:
        values = beam_logprobs((*request.prompt_ids, *output), content)
        if params.forced_eos_id is not None and len(output) + 1 == max_tokens:
            values[:] = -np.inf
            values[params.forced_eos_id] = 0.0
            return values
        if len(output) < params.min_tokens:
            values[list(ends)] = -np.inf
        tokens = (*request.prompt_ids, *output)
        values[list(repeating(tokens, params.no_repeat_ngram_size))] = -np.inf
        return values

    return reference_beams(
        logprobs_of,
        width=params.beams.width,
        end_ids=ends,
        max_tokens=max_tokens,
        length_penalty=params.beams.length_penalty,
        early_stopping=params.beams.early_stopping if params.beams.width > 1 else True,
        num_counted=params.beams.num_counted,
    )


def score(tokens: Sequence[int], target: int, content: str = PLAIN) -> TokenLogprob:
    """Return the log-probability of ``target`` after ``tokens``."""
    return TokenLogprob(target, -float(_hash([*_marked(content), *tokens, target])))


def most_tokens(request: GenerateRequest, max_len: int) -> int:
    """Return how long a sample may get where its last token is forced."""
    longest = max_len - len(request.prompt_ids)
    return longest if request.params.max_tokens is None else request.params.max_tokens


def expected_outputs(
    request: GenerateRequest,
    index: int,
    seed: int,
    max_len: int,
    *,
    copies: bool = False,
    content: str = PLAIN,
) -> list[int]:
    """Return the tokens of a sample that runs alone, with ``END_ID`` as the model's end."""
    params = request.params
    ends = frozenset(params.stop_token_ids) | ({END_ID} if not params.ignore_eos else set())
    tokens, outputs = list(request.prompt_ids), list[int]()
    while len(outputs) != params.max_tokens and len(tokens) < max_len:
        banned = ends if len(outputs) < params.min_tokens else frozenset[int]()
        banned |= repeating(tokens, params.no_repeat_ngram_size)
        token = choose_token(tokens, seed + index, banned, copies=copies, content=content)
        if params.forced_eos_id is not None and len(outputs) + 1 == most_tokens(request, max_len):
            token = params.forced_eos_id
        tokens.append(token)
        outputs.append(token)
        if token in ends:
            break
    return outputs


def expected_prompt_logprobs(
    request: GenerateRequest, content: str = PLAIN
) -> list[TokenLogprob | None]:
    """One entry per prompt token; the first is None, as are those before the first wanted."""
    prompt, start = request.prompt_ids, max(1, request.params.prompt_logprobs_start)
    return [
        score(prompt[:end], prompt[end], content) if end >= start else None
        for end in range(len(prompt))
    ]


def choose_token(
    tokens: Sequence[int],
    seed: int,
    banned: frozenset[int],
    *,
    copies: bool = False,
    content: str = PLAIN,
) -> int:
    """By all tokens before; with ``copies``, three times in four what followed the last one."""
    number = _hash([*_marked(content), seed, *tokens])
    token = number % VOCAB_SIZE
    if copies and number % 4:
        places = [i for i in range(len(tokens) - 1) if tokens[i] == tokens[-1]]
        token = tokens[places[-1] + 1] if places else token
    while token in banned:
        token = (token + 1) % VOCAB_SIZE
    return token


def _marked(content: str) -> list[int]:
    return [] if content == PLAIN else [_hash(list(content.encode()))]


def _hash(values: Sequence[int]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(list(values)).encode(), digest_size=4).digest())
