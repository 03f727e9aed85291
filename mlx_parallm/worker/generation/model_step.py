"""A step in flight: its lazy results, and what they become as Python values."""

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
from mlx_parallm.worker.device.dispatcher import Dispatch, Dispatcher
from mlx_parallm.worker.device.faults import DeviceFaults
from mlx_parallm.worker.device.step_arrays import StepArrays, TokenCopy
from mlx_parallm.worker.generation.inputs.sources import SourceDoubts
from mlx_parallm.worker.generation.step_rows import StepRows
from mlx_parallm.worker.generation.value_heads import RowValues
from mlx_parallm.worker.ops import OneStage
from mlx_parallm.worker.sampling.logprobs import TargetLogprobs
from mlx_parallm.worker.sampling.sampler import SampleResult


class ModelStep(OneStage[StepOutput], StepInFlight):
    """A step's lazy results; the device needs no help after it has begun.

    Attributes:
        tokens: the tokens that the step chooses, ``[rows]``; None if it samples nothing.
        next_tokens: the same for the next step, int32.
        token_copy: a copy of ``tokens`` from which no array is computed; None if there is none.
    """

    def __init__(  # noqa: PLR0913 - parts, by name
        self,
        rows: StepRows,
        sampled: SampleResult | None,
        scored: dict[int, TargetLogprobs],
        drafts: mx.array | None = None,
        failed: Mapping[int, str] | None = None,
        *,
        values: RowValues | None = None,
        snapshots: Mapping[int, mx.array] | None = None,
        doubts: SourceDoubts | None = None,
        faults: DeviceFaults,
        recovering: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.tokens = sampled.tokens if sampled is not None else None
        # The next step may be built while MLX submits this one: it takes an array without siblings.
        self.next_tokens = None if self.tokens is None else self.tokens.astype(mx.int32)
        self.token_copy: TokenCopy | None = None
        self._rows = rows
        self._sampled = sampled
        self._scored = scored
        self._drafts = drafts
        self._failed = {**(failed or {}), **({} if values is None else values.failed)}
        self._values = values
        # By slot: True if the snapshot has a NaN.
        self._snapshots = snapshots or {}
        self._doubts = doubts
        self._doubted = {} if doubts is None else doubts.of(rows.sequences)
        self._faults = faults
        self._num_faults = faults.count
        self._recovering = recovering
        self._written: list[mx.array] = []
        self._features: list[mx.array] = []
        self._dispatch: Dispatch | None = None
        self._dispatcher = Dispatcher()

    @cached_property
    def blocks(self) -> frozenset[int]:
        """Return the KV blocks that the step may read."""
        return frozenset(self._rows.blocks)

    def copy_tokens(self, arrays: StepArrays) -> None:
        """Make ``token_copy``."""
        if self.tokens is not None:
            self.token_copy = arrays.send(self.tokens)

    def run(self, written: list[mx.array]) -> None:
        """Compute the results and ``written``, the arrays that the step writes.

        No reference to ``written`` is kept: MLX writes a pool in place only if nothing else refers
        to it.
        """
        mx.eval(self._outputs(), written)

    def start(
        self, written: list[mx.array], features: list[mx.array], dispatcher: Dispatcher
    ) -> None:
        """Begin to compute the results and ``written``.

        Args:
            written: the arrays that the step writes.
            features: those of inputs that were begun before the step and end with it.
            dispatcher: submits them.
        """
        self._written, self._features = written, features
        self._dispatcher = dispatcher
        self._dispatch = dispatcher.begin([self._outputs(), written])

    def end(self) -> None:
        """Wait until everything is computed."""
        self._end_dispatch()
        mx.eval(self._outputs(), self._written, self._features)
        self._written, self._features = [], []

    def why_refused(self) -> Exception | None:
        """Return what stopped the submission of the step, as ``wait`` will raise it, or None.

        Nothing is being submitted.
        """
        try:
            if self._dispatch is not None:
                self._dispatch.end()
        except Exception as error:  # noqa: BLE001 - raised by ``wait``
            return error
        return None

    def _end_dispatch(self) -> None:
        """Wait until the step is submitted; raise what stopped it, each time."""
        if self._dispatch is not None:
            self._dispatch.end()
            self._dispatch = None

    @property
    def _is_plain(self) -> bool:
        """True if tokens are the only results, of which there is a copy to read.

        The next step, which may be under way to the device, computes nothing from the copy.
        """
        if self.token_copy is None or self._features:
            return False
        plain = (self.tokens, self.next_tokens, self.token_copy.array)
        return all(any(array is each for each in plain) for array in self._outputs())

    def _outputs(self) -> list[mx.array]:
        outputs = [array for result in self._scored.values() for array in result.arrays()]
        outputs += self._snapshots.values()
        outputs += [is_bad for _, is_bad in self._doubted.values()]
        outputs += [] if self._drafts is None else [self._drafts]
        outputs += [] if self.token_copy is None else [self.token_copy.array]
        outputs += [] if self.next_tokens is None else [self.next_tokens]
        outputs += [] if self._values is None else [self._values.values]
        return outputs if self._sampled is None else outputs + self._sampled.arrays()

    @override
    def wait(self) -> StepOutput:
        """The runner recovers if it raises."""
        with self._recovering():
            self._end_dispatch()
            if not self._is_plain:
                self._dispatcher.join()
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
        tokens: tuple[SampledToken, ...] = ()
        if self._sampled is not None:
            tokens = self._sampled.to_python(self._rows.sampled_ids, self.token_copy)
        if self._drafts is not None:
            self._rows.fill_proposals(np.array(self._drafts).tolist())
        scored = {seq_id: result.to_python() for seq_id, result in self._scored.items()}
        if self._values is not None:
            tokens, scored = self._values.added(self._rows, tokens, scored)
        tokens = keep_valid(tokens, self._rows.proposals)
        failed = {**_not_numbers(tokens, scored), **self._failed}
        if self._doubts is not None:
            failed |= self._doubts.failed(self._doubted)
        if failed:
            tokens = tuple(token for token in tokens if token.seq_id not in failed)
            scored = {seq_id: entries for seq_id, entries in scored.items() if seq_id not in failed}
        bad_slots = tuple(slot for slot, is_bad in self._snapshots.items() if is_bad.item())
        return StepOutput(tokens=tokens, prompt_logprobs=scored, failed=failed, bad_slots=bad_slots)


def _not_numbers(
    tokens: Sequence[SampledToken], scored: Mapping[int, Sequence[TokenLogprob]]
) -> dict[int, str]:
    """Return the sequences with a log-probability or value that is no number, and why they fail."""
    why = "The model's logits are not numbers, so there are no log-probabilities."
    seq_ids = [token.seq_id for token in tokens if token.logprob and _is_broken(token.logprob)]
    seq_ids += [seq_id for seq_id, entries in scored.items() if any(map(_is_broken, entries))]
    return dict.fromkeys(seq_ids, why)


def _is_broken(entry: TokenLogprob) -> bool:
    """True for a log-probability of NaN, or a value that JSON does not have."""
    has_value = entry.value is not None and not math.isfinite(entry.value)
    return has_value or math.isnan(entry.logprob)


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
    if not any(proposals):
        return tuple(tokens)
    kept: list[SampledToken] = []
    first = 0
    for mine in proposals:
        end = first + 1 + len(mine)
        chosen = [token.token_id for token in tokens[first:end]]
        kept += tokens[first : first + 1 + count_accepted(chosen, mine)]
        first = end
    return tuple(kept)
