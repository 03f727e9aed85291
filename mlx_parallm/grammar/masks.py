"""Computes which tokens the constrained rows of a step may choose."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par

from mlx_parallm.grammar.compiler import GrammarCompiler
from mlx_parallm.grammar.sample_matcher import SampleMatcher
from mlx_parallm.types.step import SampleSpec

_BIT = np.uint32(1)


@dataclass(frozen=True, slots=True)
class ConstrainedRow:
    """A row of a step that is sampled under a grammar."""

    row: int
    seq_id: int
    spec: SampleSpec


@dataclass(frozen=True, slots=True)
class RowMasks:
    """The masks of some rows of a step.

    Attributes:
        rows: indices of the rows, ascending.
        words: uint32 ``[len(rows), words]``: bit ``i % 32`` of word ``i // 32`` is set if token
            ``i`` is allowed; each row has at least one bit set.
        failed: by sequence, why it can have no token; such a sequence has no row here.
    """

    rows: list[int]
    words: np.ndarray
    failed: dict[int, str] = field(default_factory=dict[int, str])


class GrammarMasks:
    """Keeps a matcher for each constrained sequence; used by one thread at a time.

    A missing matcher is made again from the sequence's tokens, so matchers may be dropped.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._vocabulary = compiler.vocabulary
        self._samples: dict[int, SampleMatcher] = {}

    def __len__(self) -> int:
        """Return the number of matchers."""
        return len(self._samples)

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Drop the matchers of ended sequences."""
        for seq_id in seq_ids:
            self._samples.pop(seq_id, None)

    def compute(
        self,
        constrained: Sequence[ConstrainedRow],
        pending: Mapping[int, int] | None = None,
    ) -> RowMasks:
        """Return the masks of a step's constrained rows.

        Args:
            constrained: the rows, ascending.
            pending: the token that the step before chose, by sequence.
        """
        samples = [self._follow(row, pending or {}) for row in constrained]
        words = self._matching(samples)
        kept: list[int] = []
        failed: dict[int, str] = {}
        for place, (row, sample) in enumerate(zip(constrained, samples, strict=True)):
            if sample.has_ended:
                continue
            self._finish_row(words[place], row.spec, sample)
            if sample.error is None:
                kept.append(place)
            else:
                failed[row.seq_id] = sample.error
        if len(kept) < len(samples):
            words = words[kept]
        return RowMasks([constrained[place].row for place in kept], words, failed)

    @functools.cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor()

    def _follow(self, row: ConstrainedRow, pending: Mapping[int, int]) -> SampleMatcher:
        """Return the sequence's matcher, advanced over all tokens that the sequence has."""
        spec = row.spec
        sample = self._samples.get(row.seq_id)
        if sample is None:
            sample = self._samples[row.seq_id] = self._make(spec)
        sample.take(spec.output_ids[sample.num_taken :])
        if spec.has_pending and sample.num_taken == len(spec.output_ids):
            sample.take([pending[row.seq_id]])
        return sample

    def _make(self, spec: SampleSpec) -> SampleMatcher:
        grammar = spec.params.grammar
        assert grammar is not None, "only constrained sequences are followed"
        return SampleMatcher(self._compiler, spec.params)

    def _matching(self, samples: Sequence[SampleMatcher]) -> np.ndarray:
        """Return what the samples' matchers allow, computed without the interpreter lock."""
        num_rows = len(samples)
        jobs: list[tuple[LLMatcher, int]] = []
        # seconds: the places of samples with two matchers; the second's row is behind all others.
        seconds: list[int] = []
        for place, sample in enumerate(samples):
            for number, matcher in enumerate(sample.matchers()):
                jobs.append((matcher, num_rows + len(seconds) if number else place))
                if number:
                    seconds.append(place)
        words = np.zeros((num_rows + len(seconds), self._vocabulary.num_words), dtype=np.uint32)
        if jobs:
            fill_next_token_bitmask_par(self._executor, jobs, words.view(np.int32))
        for row, place in enumerate(seconds, num_rows):
            words[place] |= words[row]
        return words[:num_rows]

    def _finish_row(self, words: np.ndarray, spec: SampleSpec, sample: SampleMatcher) -> None:
        """Allow the sample's stop tokens, ban its banned ones; fail it if no token is left."""
        if sample.error is not None:
            return
        if sample.is_free:
            words[:] = self._vocabulary.all_tokens
            # A sample that ended before the grammar begins would not match it.
            _clear(words, sample.ends)
        elif sample.is_broken:
            sample.fail()
        else:
            _clear(words, sample.early_ends(_has(words, self._vocabulary.eos_ids)))
            if sample.stop_ids and sample.is_complete:
                _set(words, sample.stop_ids)
        if spec.banned_ids:
            without = words.copy()
            _clear(without, spec.banned_ids)
            # A complete grammar ends its sample even if that is shorter than min_tokens.
            if without.any():
                words[:] = without
        if sample.error is None and not words.any():
            sample.fail()


def _has(words: np.ndarray, token_ids: Iterable[int]) -> list[int]:
    return [token_id for token_id in token_ids if words[token_id >> 5] >> (token_id & 31) & 1]


def _set(words: np.ndarray, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        words[token_id >> 5] |= _BIT << np.uint32(token_id & 31)


def _clear(words: np.ndarray, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        words[token_id >> 5] &= ~(_BIT << np.uint32(token_id & 31))
