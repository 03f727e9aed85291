"""Steps of a model that several ranks compute: rank 0 samples, the others get its tokens."""

from __future__ import annotations

import mlx.core as mx

from mlx_parallm.worker.device.ranks import Ranks
from mlx_parallm.worker.sampling.sampler import SampleResult


class RankTokens:
    """Passes the tokens that rank 0 samples to all ranks, as part of their steps.

    A rank that runs ahead needs the tokens of the step in flight on its device, so they are a sum
    over the ranks to which only rank 0 adds more than zeros. A rank that does not run ahead gets
    them with the next batch, so nothing is summed.

    All ranks must evaluate the same last sum of a forward, or the next step meets the wrong
    partner. Followers therefore evaluate the logits that rank 0 samples or scores.
    """

    def __init__(self, ranks: Ranks, *, runs_ahead: bool) -> None:
        self._ranks = ranks
        self._runs_ahead = runs_ahead

    @property
    def samples(self) -> bool:
        """True if this rank samples."""
        return self._ranks.rank == 0

    def shared(self, sampled: SampleResult) -> SampleResult:
        """Return what rank 0 sampled, whose tokens are those of all ranks."""
        if not self._runs_ahead:
            return sampled
        return SampleResult(self._ranks.sum(sampled.tokens.astype(mx.uint32)), sampled.logprobs)

    def received(self, logits: mx.array, count: int) -> SampleResult:
        """Return what a rank that does not sample knows of a step.

        Args:
            logits: of the step's rows, ``[rows, vocab]``.
            count: the number of rows that rank 0 samples.
        """
        tokens = mx.depends(mx.zeros((count,), mx.uint32), logits)
        if count and self._runs_ahead:
            tokens = self._ranks.sum(tokens)
        return SampleResult(tokens)
