"""The forwards of one step: how they are asked for, and what their results mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_parallm.training.micro_batches import MicroBatch, micro_batches, naive_batches
from mlx_parallm.training.objectives import (
    Measure,
    Scores,
    f1_loss,
    losses,
    row_losses,
    scores,
)
from mlx_parallm.training.records import Costs, Example, Mode, SessionConfig, StepRecord
from mlx_parallm.types.gradients import GradientResult, LossKind, LossSpec
from mlx_parallm.types.training import ForwardSize, PairResult, Segment, TrainableInfo
from mlx_parallm.worker.training_ops import (
    PairForward,
)

ForwardResult = PairResult | GradientResult


@dataclass(frozen=True, slots=True)
class StepLosses:
    """The losses of a step.

    Attributes:
        means: the loss of each perturbed copy.
        rows: the losses of the examples that each was tried on, in their order.
    """

    means: Sequence[float]
    rows: Sequence[Sequence[float]]

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]]) -> StepLosses:
        """Return the losses of copies whose loss is the mean over examples."""
        return cls([float(np.mean(each)) for each in rows], rows)


@dataclass(frozen=True, slots=True)
class Draw:
    """The perturbations of a step.

    Attributes:
        seed: draws the directions.
        num_directions: how many.
        epsilon: the size of a perturbation.
    """

    seed: int = 0
    num_directions: int = 1
    epsilon: float = 0.0


#: ``UNPERTURBED``: of forwards of the parameters as they are.
UNPERTURBED = Draw()


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

    @classmethod
    def of_evaluation(cls, size: ForwardSize, examples: Sequence[Example]) -> StepForwards:
        """Cut examples into forwards of the parameters as they are."""
        now = Segment(None, 1, tuple(range(len(examples))))
        return cls.of(Mode.PAIRED, size, examples, (now,))

    def ops(self, config: SessionConfig, draw: Draw, *, keeps: bool = True) -> list[PairForward]:
        """Return the forwards as ops.

        Args:
            config: of the session.
            draw: of the perturbations.
            keeps: see ``PairForward``.
        """
        return [
            PairForward(
                model=config.model,
                session=config.id,
                inputs=[self.examples[row].input for row in part.rows],
                segments=part.segments,
                seed=draw.seed,
                num_directions=draw.num_directions,
                epsilon=draw.epsilon,
                keeps=keeps,
            )
            for part in self.parts
        ]

    def rows(self, results: Sequence[PairResult]) -> list[np.ndarray]:
        """Return the results of an evaluation, in the order of its examples."""
        of_rows: dict[int, np.ndarray] = {}
        for part, result in zip(self.parts, results, strict=True):
            of_rows |= dict(zip(part.order, result.results, strict=True))
        return [of_rows[row] for row in range(len(self.examples))]

    def losses(self, results: Sequence[PairResult], measure: Measure) -> StepLosses:
        """Return the loss of each segment: the mean of its rows, or their F1 together."""
        rows = self._row_losses(results, measure)
        if measure is Measure.F1:
            return StepLosses(self._f1_losses(results), rows)
        return StepLosses.of(rows)

    def _row_losses(self, results: Sequence[PairResult], measure: Measure) -> list[list[float]]:
        """Return the losses of the rows of each segment, which may lie in several forwards."""
        of_rows: list[dict[int, float]] = [{} for _ in self.segments]
        for part, result in zip(self.parts, results, strict=True):
            labels = [self.examples[row].label for row in part.order]
            every = iter(losses(result.results, labels, measure).tolist())
            for place, segment in zip(part.places, part.segments, strict=True):
                of_rows[place] |= {part.rows[row]: next(every) for row in segment.rows}
        return [
            [of_row[row] for row in segment.rows]
            for of_row, segment in zip(of_rows, self.segments, strict=True)
        ]

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

    def layer_tokens(self, info: TrainableInfo, results: Sequence[ForwardResult]) -> int:
        """Return how many tokens were computed, times the layers that computed them."""
        first = info.first_layer if info.keeps_prefix else 0
        above = sum(part.num_tokens for part in self.parts) * (info.num_layers - first)
        return above + first * sum(result.frozen_tokens for result in results)

    def naive_layer_tokens(self, info: TrainableInfo) -> int:
        """Return what one forward for each copy would compute, padded to the longest."""
        naive = naive_batches(_lengths(self.examples), self.segments)
        return sum(part.num_tokens for part in naive) * info.num_layers


def _lengths(examples: Sequence[Example]) -> list[int]:
    return [example.num_tokens for example in examples]


@dataclass(frozen=True, slots=True)
class MadeStep:
    """A step that was made, and the losses that it was made from."""

    record: StepRecord
    losses: StepLosses


def costs_of(
    forwards: StepForwards, results: Sequence[ForwardResult], seconds: float, info: TrainableInfo
) -> Costs:
    """Return what a step cost: its lookups, hits, computed tokens by layers, and seconds."""
    return Costs(
        lookups=sum(result.lookups for result in results),
        hits=sum(result.hits for result in results),
        layer_tokens=forwards.layer_tokens(info, results),
        naive_layer_tokens=forwards.naive_layer_tokens(info),
        seconds=seconds,
    )


def scores_of(
    results: Sequence[np.ndarray], examples: Sequence[Example], loss: LossSpec | None
) -> Scores:
    """Return how well examples are learnt, from the results of all of their inputs.

    Pairs are right if the chosen is ahead.
    """
    if loss is None or loss.kind not in (LossKind.DPO, LossKind.PAIRWISE):
        return scores(results, [example.label for example in examples])
    inputs = [item for example in examples for item in example.inputs]
    values, facts = row_losses(results, inputs, loss, [each.loss_target for each in examples])
    accuracy = float(facts["accuracies"].mean())
    return Scores(loss=float(values.mean()), accuracy=accuracy, f1=None)
