"""A runner that keeps block contents as plain lists and samples by reading them back.

A wrong block table, a missed copy, a block reused too early or a bad prefix hit makes it read other
tokens than the sequence's own, and so choose another token than ``expected_outputs`` does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

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


class SimulatedRunner:
    """Runs batches over a store of ``num_blocks`` blocks and one token list per state slot."""

    def __init__(
        self, num_blocks: int, block_size: int, num_slots: int, *, has_state: bool
    ) -> None:
        self._block_size = block_size
        self._blocks: list[list[int]] = [[-1] * block_size for _ in range(num_blocks)]
        self._states: list[list[int]] = [[-1] for _ in range(num_slots)]
        self._has_state = has_state
        self._chosen: dict[int, int] = {}

    def run(self, batch: ScheduledBatch, failed: frozenset[int] = frozenset()) -> StepOutput:
        """One step; the sequences in ``failed`` leave garbage behind."""
        for source, target in batch.block_copies:
            self._blocks[target] = list(self._blocks[source])
        for source, target in batch.state_copies:
            self._states[target] = list(self._states[source])
        for row in batch.sequences:
            self._write(row, garbage=row.seq_id in failed)
        good = [row for row in batch.sequences if row.seq_id not in failed]
        self._chosen = {
            row.seq_id: choose(self._read(row), row.sample)
            for row in good
            if row.sample is not None
        }
        return StepOutput(
            tokens=tuple(
                SampledToken(seq_id=seq_id, token_id=token)
                for seq_id, token in self._chosen.items()
            ),
            prompt_logprobs={row.seq_id: self._score(row) for row in good if row.target_ids},
            failed=dict.fromkeys(failed, "failed"),
        )

    def corrupt(self, batch: ScheduledBatch) -> None:
        """What a step that raises may leave behind."""
        for row in batch.sequences:
            self._write(row, garbage=True)
        self._chosen = {}

    def _write(self, row: ScheduledSequence, *, garbage: bool) -> None:
        tokens = [-1] * len(row.token_ids) if garbage else row.token_ids
        if tokens == (PENDING_TOKEN,):
            # The step before may have failed: then this row is in vain.
            tokens = [self._chosen.get(row.seq_id, -1)]
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
        if self._has_state and tokens[-1] != -1:
            assert self._states[row.slot] == tokens, "a slot holds another sequence's state"
        return tokens

    def _score(self, row: ScheduledSequence) -> tuple[TokenLogprob, ...]:
        tokens = self._read(row)
        return tuple(
            score(tokens[: row.start + offset + 1], target)
            for offset, target in enumerate(row.target_ids)
        )


def choose(tokens: Sequence[int], spec: SampleSpec) -> int:
    """The token that follows ``tokens``, as ``spec`` asks."""
    assert spec.position == len(tokens)
    return _choose(tokens, spec.seed, frozenset(spec.banned_ids))


def score(tokens: Sequence[int], target: int) -> TokenLogprob:
    """The log-probability of ``target`` after ``tokens``."""
    return TokenLogprob(target, -float(_hash([*tokens, target])))


def expected_outputs(request: GenerateRequest, index: int, seed: int, max_len: int) -> list[int]:
    """The tokens of a sample that runs alone, with ``END_ID`` as the model's end."""
    params = request.params
    ends = frozenset(params.stop_token_ids) | ({END_ID} if not params.ignore_eos else set())
    tokens, outputs = list(request.prompt_ids), list[int]()
    while len(outputs) != params.max_tokens and len(tokens) < max_len:
        banned = ends if len(outputs) < params.min_tokens else frozenset[int]()
        token = _choose(tokens, seed + index, banned)
        tokens.append(token)
        outputs.append(token)
        if token in ends:
            break
    return outputs


def expected_prompt_logprobs(request: GenerateRequest) -> list[TokenLogprob | None]:
    """One entry per prompt token; the first is None."""
    prompt = request.prompt_ids
    return [None, *(score(prompt[:end], prompt[end]) for end in range(1, len(prompt)))]


def _choose(tokens: Sequence[int], seed: int, banned: frozenset[int]) -> int:
    token = _hash([seed, *tokens]) % VOCAB_SIZE
    while token in banned:
        token = (token + 1) % VOCAB_SIZE
    return token


def _hash(values: Sequence[int]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(list(values)).encode(), digest_size=4).digest())
