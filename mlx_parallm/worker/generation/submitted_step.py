"""A step that was submitted: what it computes, and how its results are read.

After the sampler has chosen a token for every row, a step decides which proposals stand. Each row
samples by its own key (seed, position), whatever was proposed; a proposal stands if it equals the
choice of the row before it. For a deterministic proposal x this is rejection sampling: x is
accepted with probability p(x), and otherwise the choice follows p without x, renormalised. For a
draft model that samples with the same key it is the Gumbel coupling of the two distributions
(Daliri, Musco and Suresh, arXiv:2408.07978). Either way a sequence gets exactly the tokens that it
gets without proposals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property

import mlx.core as mx
import numpy as np
from typing_extensions import override

from mlx_parallm.types.errors import StepError
from mlx_parallm.types.step import SampledToken, StepInFlight, StepOutput, TokenLogprob
from mlx_parallm.worker.device.faults import DeviceFaults
from mlx_parallm.worker.generation.step_rows import StepRows
from mlx_parallm.worker.ops import Pending
from mlx_parallm.worker.sampling.logprobs import TargetLogprobs
from mlx_parallm.worker.sampling.sampler import SampleResult


class ModelStep(Pending, StepInFlight):
    """A step's lazy results. Implements ``StepInFlight`` and ``Pending``.

    Attributes:
        tokens: the tokens that the step chooses, ``[rows]``; None if it samples nothing.
        token_copy: a copy of ``tokens`` from which no array is computed; None if there is none.
    """

    def __init__(
        self,
        rows: StepRows,
        sampled: SampleResult | None,
        scored: dict[int, TargetLogprobs],
        drafts: mx.array | None = None,
        failed: Mapping[int, str] | None = None,
        *,
        faults: DeviceFaults,
        recovering: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.tokens = sampled.tokens if sampled is not None else None
        self.token_copy: mx.array | None = None
        self._rows = rows
        self._sampled = sampled
        self._scored = scored
        self._drafts = drafts
        self._failed = failed or {}
        self._faults = faults
        self._num_faults = faults.count
        self._recovering = recovering
        self._written: list[mx.array] = []
        self._features: list[mx.array] = []

    @cached_property
    def blocks(self) -> frozenset[int]:
        """Return the KV blocks that the step may read."""
        return frozenset(self._rows.blocks)

    def copy_tokens(self) -> None:
        """Make ``token_copy``."""
        if self.tokens is not None:
            self.token_copy = self.tokens.astype(mx.int32)

    def start(self, written: list[mx.array], features: list[mx.array], *, wait: bool) -> None:
        """Begin to compute the results and ``written``.

        With ``wait``, no reference to ``written`` is kept: MLX writes a pool in place only if
        nothing else refers to it.

        Args:
            written: the arrays that the step writes.
            features: those of inputs that were begun before the step and end with it.
            wait: True to wait until everything is computed.
        """
        (mx.eval if wait else mx.async_eval)(self._outputs(), written)
        if not wait:
            self._written, self._features = written, features

    @property
    @override
    def num_stages(self) -> int:
        """The device needs no help after the first stage."""
        return 1

    @override
    def advance(self) -> None:
        raise AssertionError("the last stage is computed by wait")

    def end(self) -> None:
        """Wait until everything is computed."""
        mx.eval(self._outputs(), self._written, self._features)
        self._written, self._features = [], []

    def _outputs(self) -> list[mx.array]:
        outputs = [array for result in self._scored.values() for array in result.arrays()]
        outputs += [array for array in (self._drafts, self.token_copy) if array is not None]
        return outputs if self._sampled is None else outputs + self._sampled.arrays()

    @override
    def wait(self) -> StepOutput:
        """The runner recovers if it raises."""
        with self._recovering():
            self._check_faults()
            self._end_unread()
            return self._output()

    def _end_unread(self) -> None:
        """Wait for what the step computes besides the outputs that are read.

        The caller lets later steps find the KV and the features. A step without outputs is the last
        one if it has not ended: another would have ended it, see ``ModelRunner._end_latest``. So
        the whole device is asked: MLX does not raise the error of an array that is complete.
        """
        mx.eval(self._features)
        if self._written and not self._outputs():
            mx.synchronize()
            self._written = []
        self._features = []

    def _check_faults(self) -> None:
        """Raise StepError if the device has failed since the step began: it may be this step."""
        if self._faults.count != self._num_faults:
            raise StepError("the device failed while the step was in flight")

    def _output(self) -> StepOutput:
        tokens = self._sampled.to_python(self._rows.sampled_ids) if self._sampled else ()
        if self._drafts is not None:
            self._rows.fill_proposals(np.array(self._drafts).tolist())
        tokens = keep_valid(tokens, self._rows.proposals)
        scored = {seq_id: result.to_python() for seq_id, result in self._scored.items()}
        failed = {**_not_numbers(tokens, scored), **self._failed}
        if failed:
            tokens = tuple(token for token in tokens if token.seq_id not in failed)
            scored = {seq_id: entries for seq_id, entries in scored.items() if seq_id not in failed}
        return StepOutput(tokens=tokens, prompt_logprobs=scored, failed=failed)


def _not_numbers(
    tokens: Sequence[SampledToken], scored: Mapping[int, Sequence[TokenLogprob]]
) -> dict[int, str]:
    """Return the sequences that have a log-probability of NaN, each with why it fails."""
    why = "The model's logits are not numbers, so there are no log-probabilities."
    seq_ids = [
        token.seq_id for token in tokens if token.logprob and math.isnan(token.logprob.logprob)
    ]
    seq_ids += [
        seq_id
        for seq_id, entries in scored.items()
        if any(math.isnan(entry.logprob) for entry in entries)
    ]
    return dict.fromkeys(seq_ids, why)


def count_accepted(chosen: Sequence[int], proposals: Sequence[int]) -> int:
    """Return how many proposals, from the first on, equal the token chosen in their place.

    ``chosen[i]`` follows the first i proposals.
    """
    for count, (token, proposal) in enumerate(zip(chosen, proposals, strict=False)):
        if token != proposal:
            return count
    return len(proposals)


def keep_valid(
    tokens: Sequence[SampledToken], proposals: Sequence[Sequence[int]]
) -> tuple[SampledToken, ...]:
    """Return the tokens without those chosen after a refused proposal.

    Args:
        tokens: for each sequence, one after its last token and one after each proposal.
        proposals: the proposals of each sequence.
    """
    kept: list[SampledToken] = []
    first = 0
    for mine in proposals:
        end = first + 1 + len(mine)
        chosen = [token.token_id for token in tokens[first:end]]
        kept += tokens[first : first + 1 + count_accepted(chosen, mine)]
        first = end
    return tuple(kept)
