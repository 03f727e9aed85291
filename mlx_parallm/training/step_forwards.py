"""The forwards of one step: how they are asked for, and what their results mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_parallm.training.micro_batches import MicroBatch, micro_batches, naive_batches
from mlx_parallm.training.objectives import Measure, f1_loss, losses
from mlx_parallm.training.records import Example, Mode, SessionConfig
from mlx_parallm.types.training import ForwardSize, PairResult, Segment, TrainableInfo, num_tokens
from mlx_parallm.worker.ops import PairForward


@dataclass(frozen=True, slots=True)
class StepForwards:
    """The forwards of a step.

    Attributes:
        examples: the batch.
        segments: the perturbed copies, and the rows of the batch that each is tried on.
        parts: the forwards.
    """

    examples: Sequence[Example]
    segments: Sequence[Segment]
    parts: Sequence[MicroBatch]

    @classmethod
    def of(
        cls,
        mode: Mode,
        size: ForwardSize,
        examples: Sequence[Example],
        segments: Sequence[Segment],
    ) -> StepForwards:
        """Cut a batch into forwards, whose sizes are the same for a whole session."""
        lengths = _lengths(examples)
        if mode is Mode.NAIVE:
            return cls(examples, segments, naive_batches(lengths, segments))
        return cls(examples, segments, micro_batches(lengths, segments, size))

    def ops(self, config: SessionConfig, seed: int) -> list[PairForward]:
        """Return the forwards as ops; ``seed`` draws the directions."""
        return [
            PairForward(
                model=config.model,
                session=config.id,
                inputs=[self.examples[row].input for row in part.rows],
                segments=part.segments,
                seed=seed,
                num_directions=config.estimator.num_directions,
                epsilon=config.estimator.epsilon,
            )
            for part in self.parts
        ]

    def losses(self, results: Sequence[PairResult], measure: Measure) -> list[float]:
        """Return the loss of each segment: the mean of its rows, or their F1 together."""
        if measure is Measure.F1:
            return self._f1_losses(results)
        sums = np.zeros(len(self.segments))
        for part, result in zip(self.parts, results, strict=True):
            rows = [row for segment in part.segments for row in segment.rows]
            labels = [self.examples[part.rows[row]].label for row in rows]
            every = losses(result.results, labels, measure).reshape(len(part.segments), -1)
            sums[list(part.places)] += every.sum(axis=1)
        counts = [len(segment.rows) for segment in self.segments]
        return [float(total) / count for total, count in zip(sums, counts, strict=True)]

    def _f1_losses(self, results: Sequence[PairResult]) -> list[float]:
        """Return the loss of each segment, whose rows may lie in several forwards."""
        logits: list[list[np.ndarray]] = [[] for _ in self.segments]
        labels: list[list[int]] = [[] for _ in self.segments]
        for part, result in zip(self.parts, results, strict=True):
            rows = iter(result.results)
            for place, segment in zip(part.places, part.segments, strict=True):
                logits[place] += [next(rows) for _ in segment.rows]
                labels[place] += [self.examples[part.rows[row]].label for row in segment.rows]
        return [f1_loss(*each) for each in zip(logits, labels, strict=True)]

    def layer_tokens(self, info: TrainableInfo, results: Sequence[PairResult]) -> int:
        """Return how many tokens were computed, times the layers that computed them."""
        first = info.first_layer if info.keeps_prefix else 0
        above = sum(part.num_tokens for part in self.parts) * (info.num_layers - first)
        return above + first * sum(result.frozen_tokens for result in results)

    def naive_layer_tokens(self, info: TrainableInfo) -> int:
        """Return what one forward for each copy would compute, padded to the longest."""
        naive = naive_batches(_lengths(self.examples), self.segments)
        return sum(part.num_tokens for part in naive) * info.num_layers


def _lengths(examples: Sequence[Example]) -> list[int]:
    return [num_tokens(example.input) for example in examples]
