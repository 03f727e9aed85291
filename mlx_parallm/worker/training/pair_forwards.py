"""Forwards of a model with perturbed copies of a trainable adapter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import mlx.core as mx
from typing_extensions import override

from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.training import PairResult, TrainingInput
from mlx_parallm.worker.ops import (
    Pending,
)
from mlx_parallm.worker.pooling.layer_stages import StagedJob
from mlx_parallm.worker.training.directions import Copies
from mlx_parallm.worker.training.frozen_prefix import FrozenPrefix, PrefixLookup
from mlx_parallm.worker.training.trainable import TrainableAdapter
from mlx_parallm.worker.training.trained_model import TrainedModel


class PairJob(Pending):
    """A forward of perturbed copies, and what was found for it.

    The stages before those of the layers draw the copies, and compute the states of each text
    that were not kept.
    """

    def __init__(
        self,
        build: Callable[[], StagedJob],
        copies: Copies,
        missing: Sequence[Callable[[], None]] = (),
        counts: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        """Prepare.

        Args:
            build: returns the forward, once copies are drawn and what was missing is computed.
            copies: of the parameters.
            missing: computes what is missing, one text each.
            counts: the last fields of ``PairResult``.
        """
        self._build = build
        self._before = [copies.advance] * copies.num_stages + list(missing)
        self._job = None if self._before else build()
        self._counts = counts

    @property
    @override
    def num_stages(self) -> int:
        return len(self._before) + 1 if self._job is None else self._job.num_stages

    @override
    def advance(self) -> None:
        if self._job is not None:
            self._job.advance()
            return
        self._before.pop(0)()
        if not self._before:
            self._job = self._build()

    @override
    def wait(self) -> PairResult:
        while self._job is None:
            self.advance()
        return PairResult(self._job.wait(), *self._counts)


class PairForwards:
    """Runs the inputs of a step through perturbed copies of one adapter, all copies at once."""

    def __init__(
        self, model: TrainedModel, trainable: TrainableAdapter, prefix: FrozenPrefix
    ) -> None:
        """Prepare.

        Args:
            model: runs the model.
            trainable: the adapter.
            prefix: the layers before its lowest one.

        Raises:
            InvalidRequestError: all rows of a forward share the result of a trained layer, such as
                that of relative positions in DeBERTa, so that copies cannot have results of their
                own.
        """
        shared = sorted({layer.path for layer in trainable.layers} & set(model.shared))
        if shared:
            raise InvalidRequestError(
                f"{shared[0]} cannot be trained: all texts of a batch share what it computes.",
                param="trainable.targets",
            )
        self._model = model
        self._trainable = trainable
        self._prefix = prefix

    def begin(
        self,
        inputs: Sequence[TrainingInput],
        segments: Sequence[Sequence[int]],
        copies: Copies,
        *,
        keeps: bool = True,
    ) -> PairJob:
        """Return the forward of all segments, of which nothing is computed yet.

        Its results are those of the heads for each row, in the order of the segments.

        Args:
            inputs: the inputs of the step; none names an adapter.
            segments: for each copy, indices of its inputs; all have the same length.
            copies: the parameters of each copy.
            keeps: see ``PairForward``.
        """
        rows = [inputs[index] for segment in segments for index in segment]
        lookup = self._prefix.lookup(inputs, keeps=keeps)
        if lookup is None:
            return PairJob(partial(self._build, rows, copies), copies)
        texts = _rows(lookup.texts, segments)
        build = partial(self._build_above, lookup, texts, rows, copies)
        return PairJob(build, copies, lookup.missing, lookup.counts)

    def _build_above(
        self,
        lookup: PrefixLookup,
        texts: Sequence[int],
        rows: Sequence[TrainingInput],
        copies: Copies,
    ) -> StagedJob:
        """Return the forward of rows from the lowest trained layer on.

        ``texts``: for each row of the forward, the index of its text in the lookup.
        """
        with self._prefix.entered(lookup.hidden()[mx.array(list(texts))]):
            return self._build(rows, copies, self._prefix.first_layer)

    def _build(
        self, rows: Sequence[TrainingInput], copies: Copies, first_layer: int = 0
    ) -> StagedJob:
        """Return the forward of rows from a layer on; of each segment with its copy."""
        parameters = copies.value()
        stacks, heads = self._trainable.stacks(parameters), self._trainable.heads(parameters)
        return self._model.changed_job(rows, stacks, first_layer, heads)


def _rows(texts: Sequence[Sequence[Any]], segments: Sequence[Sequence[int]]) -> list[int]:
    """Return the indices of all segments' texts, if those of all inputs are in one list."""
    firsts = [0, *accumulate(map(len, texts))]
    return [
        row
        for segment in segments
        for index in segment
        for row in range(firsts[index], firsts[index + 1])
    ]
