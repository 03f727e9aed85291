"""Finds out at load how a model with states runs rows with proposals.

Where all goes well, rows of equal length run as one group, and the states before each proposal are
kept. Which layers allow that is not known from their names, so it is tried on random texts.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import mlx.core as mx

from mlx_parallm.types.request import SamplingParams
from mlx_parallm.types.step import SampleSpec, ScheduledSequence
from mlx_parallm.worker.device.faults import MODEL_ERRORS
from mlx_parallm.worker.device.ranks import Ranks, agreed
from mlx_parallm.worker.generation.load.self_check import (
    CHUNK,
    LARGE_LOGIT,
    MAX_CHUNKS,
    agrees_with,
    random_texts,
    row_of,
)
from mlx_parallm.worker.generation.paths.base import ForwardPath
from mlx_parallm.worker.generation.paths.split import SplitPath
from mlx_parallm.worker.generation.state_store import States
from mlx_parallm.worker.generation.step_rows import token_array

logger = logging.getLogger(__name__)

# NUM_TEXTS, NUM_TOKENS: rows that are checked, and their tokens, of which the first is no proposal.
# Convolutions keep fewer inputs, nearly always three.
NUM_TEXTS = 2
NUM_TOKENS = 5
# FAR: what is added to slots for others that nothing uses.
FAR = 1000
# MAX_SHARE: most that a kept state may differ from that of tokens run one by one, as a part of what
# a token changes. A state that is one token late differs by all of it. Rounding to 16 bits differs
# by about a tenth after many layers.
MAX_SHARE = {"float32": 0.01}
MAX_SHARE_16 = 0.5
_SPEC = SampleSpec(params=SamplingParams(), seed=0, position=0, prompt_ids=(), output_ids=())


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalChoice:
    """The way in which rows with proposals run in a model with states.

    Attributes:
        batches: True if rows of equal length run as one group.
        keeps_states: see ``RunnerInfo``.
        compiles: True if steps of these rows and decode rows are calls of a compiled function.
    """

    batches: bool = False
    keeps_states: bool = False
    compiles: bool = False


def choose_proposals(
    path: ForwardPath,
    *,
    vocab_size: int,
    window: int | None,
    block_size: int,
    dtype: str,
    chosen: ProposalChoice | None = None,
    ranks: Ranks | None = None,
) -> ProposalChoice:
    """Let a path run rows with proposals in the best way that is right, and return that.

    Args:
        path: the path; its states are forgotten.
        vocab_size: the number of rows of the embedding table.
        window: the length beyond which the model attends to a part of its past; None if never.
        block_size: the tokens of a block.
        dtype: the model's dtype, which decides the tolerance.
        chosen: an earlier choice on an equal device, which is taken; None to choose.
        ranks: the processes that compute the model together and must choose alike.
    """
    if not isinstance(path, SplitPath) or not path.has_state:
        return ProposalChoice()
    if chosen is None:
        check = _Check(path, random_texts(vocab_size, window)[-NUM_TEXTS:], block_size, dtype)
        chosen = check.choose(lambda is_right: agreed(ranks, is_right))
        path.states.forget()
        logger.debug("rows with proposals: %s", chosen)
    path.batch_proposals, path.keeps_states = chosen.batches, chosen.keeps_states
    path.compiles_proposals = chosen.compiles
    return chosen


class _Check:
    def __init__(
        self, path: SplitPath, texts: Sequence[list[int]], block_size: int, dtype: str
    ) -> None:
        self._path = path
        self._texts = texts
        self._block_size = block_size
        self._dtype = dtype
        self._num_tokens = [NUM_TOKENS] * len(texts)

    def choose(self, agree: Callable[[bool], bool]) -> ProposalChoice:
        """Try, and return what was right; ``agree`` returns True if it was so in all ranks."""
        path = self._path
        path.batch_proposals = path.keeps_states = path.compiles_proposals = False
        apart = self._verify()
        batches = False
        if path.batch_decode:
            path.batch_proposals = True
            batches = agree(self._is_right(lambda: self._is_same(self._verify(), apart)))
        path.batch_proposals, path.keeps_states = batches, True
        keeps_states = agree(self._is_right(self._keeps_states))
        compiles = False
        if keeps_states and path.is_compiled:
            # The last row has fewer tokens than it is padded to.
            self._num_tokens[-1] -= 2
            wanted = self._verify()
            path.compiles_proposals = True
            compiles = agree(
                self._is_right(
                    lambda: self._is_same(self._verify(), wanted) and self._keeps_states()
                )
            )
        return ProposalChoice(batches=batches, keeps_states=keeps_states, compiles=compiles)

    @staticmethod
    def _is_right(attempt: Callable[[], bool]) -> bool:
        try:
            return attempt()
        except MODEL_ERRORS as reason:
            logger.debug("rows with proposals: %s: %s", type(reason).__name__, reason)
            return False

    def _is_same(self, actual: mx.array, wanted: mx.array) -> bool:
        """True if log-probabilities of rows differ by rounding only."""
        logprobs, expected = (
            logits - mx.logsumexp(logits, axis=-1, keepdims=True) for logits in (actual, wanted)
        )
        units = mx.maximum(mx.abs(wanted) / LARGE_LOGIT, 1.0)
        difference = mx.where(logprobs == expected, 0.0, mx.abs(logprobs - expected) / units)
        return agrees_with(cast("float", difference.max().item()), self._dtype)

    def _keeps_states(self) -> bool:
        """True if all kept states are those of tokens that run one by one.

        States are compared one after the other, because those of large models take much memory.
        """
        self._verify()
        # Each row's states after 1, 2, … tokens, the last in the slot of the row.
        kept = [(*row.kept_slots, row.slot) for row in self._rows_with_proposals()]
        moved = [tuple(slot + FAR for slot in slots) for slots in kept]
        self._path.copy_state(
            [pair for slots in zip(kept, moved, strict=True) for pair in zip(*slots, strict=True)]
        )
        self._prefill()
        changes = _Changes()
        for i, slots in enumerate(moved):
            before = self._states([i])
            for index, slot in enumerate(slots):
                first = self._first(i) + index
                self._run([self._row(i, first, first + 1)])
                single = self._states([i])
                changes.add(self._take([slot]), single, before)
                before = single
        most = MAX_SHARE.get(self._dtype, MAX_SHARE_16)
        logger.debug("kept states differ by %s of what a token changes", changes.largest_share)
        return changes.largest_share <= most

    def _verify(self) -> mx.array:
        """Prefill the texts, run their last tokens as rows with proposals; return the logits."""
        self._prefill()
        return self._run(self._rows_with_proposals())

    def _first(self, index: int) -> int:
        """Return the position of a row's first token."""
        return len(self._texts[index]) - self._num_tokens[index]

    def _rows_with_proposals(self) -> list[ScheduledSequence]:
        rows = [self._row(i, self._first(i), len(text)) for i, text in enumerate(self._texts)]
        return [self._with_proposals(row) for row in rows]

    def _with_proposals(self, row: ScheduledSequence) -> ScheduledSequence:
        count = len(row.token_ids) - 1
        first = len(self._texts) + NUM_TOKENS * row.slot
        kept_slots = range(first, first + count) if self._path.keeps_states else ()
        return replace(row, verify=(_SPEC,) * count, kept_slots=tuple(kept_slots))

    def _prefill(self) -> None:
        """Compute all but the last tokens of the texts."""
        for i in range(len(self._texts)):
            last = self._first(i)
            size = max(CHUNK, last // MAX_CHUNKS)
            for start in range(0, last, size):
                self._run([self._row(i, start, min(start + size, last))])

    def _row(self, index: int, start: int, end: int) -> ScheduledSequence:
        return row_of(
            self._texts[index],
            index,
            start,
            end,
            num_texts=len(self._texts),
            block_size=self._block_size,
        )

    def _run(self, rows: Sequence[ScheduledSequence]) -> mx.array:
        tokens = token_array(rows)
        logits = self._path.logits(rows, tokens, range(tokens.size)).astype(mx.float32)
        mx.eval(logits, self._path.arrays())
        return logits

    def _states(self, slots: Sequence[int]) -> States:
        states = self._path.states.fetch(slots)
        mx.eval(states)
        return states

    def _take(self, slots: Sequence[int]) -> States:
        """Return the states of slots, and forget them."""
        states = self._states(slots)
        for slot in slots:
            self._path.states.reset(slot)
        return states


class _Changes:
    """Differences of kept states from those wanted, as parts of what tokens change."""

    def __init__(self) -> None:
        self._errors: dict[tuple[int, int], float] = defaultdict(float)
        self._changes: dict[tuple[int, int], float] = defaultdict(float)

    def add(self, kept: States, wanted: States, before: States) -> None:
        """Add the states after some tokens; those ``before`` are a token earlier."""
        for cache, entries in enumerate(wanted):
            for entry, state in enumerate(entries):
                key = cache, entry
                self._errors[key] += _squares(kept[cache][entry], state)
                self._changes[key] += _squares(before[cache][entry], state)

    @property
    def largest_share(self) -> float:
        """The largest of all entries, by Euclidean distances; infinite if one is no number."""
        shares = [
            math.sqrt(error / self._changes[key]) if self._changes[key] else math.inf
            for key, error in self._errors.items()
            if error
        ]
        return max((share if share == share else math.inf for share in shares), default=0.0)


def _squares(state: mx.array, other: mx.array) -> float:
    difference = state.astype(mx.float32) - other.astype(mx.float32)
    return cast("float", mx.square(difference).sum().item())
