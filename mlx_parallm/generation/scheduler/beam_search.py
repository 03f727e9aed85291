"""The search itself: candidates, live beams and finished hypotheses, by the rules of transformers.

It is ``GenerationMixin._beam_search`` of transformers 5.23 for one prompt, without sampling. Ties
go to the better beam, then to the likelier token; there they go either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlx_parallm.types.beams import NEVER, BeamParams
from mlx_parallm.types.request import (
    ADJUSTED_LOGPROBS,
    ALL_TOKENS,
    DEFAULT_VERSION,
    RENORMALIZED_LOGPROBS,
    SamplingParams,
)
from mlx_parallm.types.step import TokenLogprob


def count_candidates(params: BeamParams, num_ends: int) -> int:
    """Return how many of the likeliest tokens each beam must report.

    At most as many as the width go on, and before these come at most all ``num_ends`` end tokens.
    """
    return params.width + num_ends


def candidate_params(params: SamplingParams, beams: BeamParams, num_ends: int) -> SamplingParams:
    """Return parameters of rows that report what a search needs, and what the caller wants."""
    count = ALL_TOKENS
    if params.logprobs != ALL_TOKENS:
        count = max(count_candidates(beams, num_ends), params.logprobs or 0)
    mode = RENORMALIZED_LOGPROBS if beams.renormalizes else ADJUSTED_LOGPROBS
    return replace(params, beams=None, n=1, logprobs=count, logprobs_mode=mode)


@dataclass(frozen=True, slots=True)
class BeamToken:
    """A token that may follow a beam.

    Attributes:
        entry: the token, its log-probability given the beam, and the alternatives to report.
        version: label of the weights that computed it.
    """

    entry: TokenLogprob
    version: str = DEFAULT_VERSION


@dataclass(frozen=True, slots=True)
class Beam:
    """The tokens generated so far, and the sum of their log-probabilities."""

    tokens: tuple[BeamToken, ...] = ()
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A beam that has ended.

    Attributes:
        tokens: its tokens, the end token included.
        total: the sum of their log-probabilities.
        score: by which hypotheses are compared.
        is_stopped: True if an end token ended it, False if it is as long as it may be, also where
            that forced an end token.
    """

    tokens: tuple[BeamToken, ...]
    total: float
    score: float
    is_stopped: bool


@dataclass(frozen=True, slots=True)
class _Candidate:
    parent: int
    token: BeamToken
    total: float


class BeamSearch:
    """One request's search.

    Attributes:
        beams: the live beams, best first: one before the first step, then at most as many as the
            width.
        is_done: True if nothing follows.
    """

    def __init__(
        self,
        params: BeamParams,
        end_ids: frozenset[int],
        max_tokens: int,
        *,
        forces_end: bool = False,
    ) -> None:
        """Begin with one beam without tokens.

        Args:
            params: the settings.
            end_ids: tokens that end a hypothesis.
            max_tokens: most tokens of a hypothesis, at least 1.
            forces_end: True if the last of so many tokens is forced.
        """
        self._params = params
        self._end_ids = end_ids
        self._max_tokens = max_tokens
        self._forces_end = forces_end
        self._num_tokens = 0
        # Best first, at most as many as the width.
        self._finished: list[Hypothesis] = []
        self.beams = [Beam()]
        self.is_done = False

    def advance(self, rows: Sequence[Sequence[BeamToken]]) -> list[int]:
        """Take the likeliest tokens of every live beam; return the parent of each new live beam.

        Args:
            rows: for each live beam, as many tokens as ``count_candidates`` says, best first; fewer
                if no more are possible.

        Returns:
            Indices into the former ``beams``; empty if the search is done.
        """
        width = self._params.width
        self._num_tokens += 1
        candidates = [
            _Candidate(parent, token, beam.total + token.entry.logprob)
            for parent, (beam, row) in enumerate(zip(self.beams, rows, strict=True))
            for token in row
        ]
        candidates.sort(key=lambda candidate: -candidate.total)
        going_on = [each for each in candidates if not self._ends(each)][:width]
        self._finish([each for each in candidates[:width] if self._ends(each)])
        self.is_done = not going_on or self._is_decided(going_on[0].total)
        if self.is_done:
            return []
        self.beams = [Beam(self._tokens(each), each.total) for each in going_on]
        return [each.parent for each in going_on]

    def results(self, count: int) -> list[Hypothesis]:
        """Return the best finished hypotheses, best first; fewer if there are not so many."""
        return self._finished[:count]

    def _ends(self, candidate: _Candidate) -> bool:
        is_full = self._num_tokens >= self._max_tokens
        return is_full or candidate.token.entry.token_id in self._end_ids

    def _tokens(self, candidate: _Candidate) -> tuple[BeamToken, ...]:
        return (*self.beams[candidate.parent].tokens, candidate.token)

    def _finish(self, candidates: Sequence[_Candidate]) -> None:
        """Keep the best of the finished hypotheses and these candidates."""
        is_forced = self._forces_end and self._num_tokens >= self._max_tokens
        self._finished += [
            Hypothesis(
                tokens=self._tokens(each),
                total=each.total,
                score=self._score(each.total, self._num_tokens),
                is_stopped=not is_forced and each.token.entry.token_id in self._end_ids,
            )
            for each in candidates
        ]
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self._finished[self._params.width :]

    def _is_decided(self, best_total: float) -> bool:
        """Return True if there are enough hypotheses, given the best live beam's sum."""
        params = self._params
        if len(self._finished) < params.width:
            return False
        # With one beam transformers decodes greedily, up to the first end.
        if params.early_stopping is True or params.width == 1:
            return True
        is_long = params.early_stopping == NEVER and params.length_penalty > 0
        length = self._max_tokens if is_long else self._num_tokens
        return self._score(best_total, length) <= self._finished[-1].score

    def _score(self, total: float, num_tokens: int) -> float:
        length = num_tokens + self._params.num_counted
        return total / float(length) ** self._params.length_penalty
