"""Learning curves of training sessions, and of first order on the same parameters.

Sessions run in this process by the ops that a server sends. The first-order method is Adam on the
gradient of the same loss with respect to the same factors; it exists in benchmarks only. Its memory
is not that of a session: all activations between the lowest trained layer and the loss are kept for
the gradient, and the optimiser has two numbers for each parameter (``benchmarks.mezo_memory``).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

from mlx_parallm.training.batches import Batches, BatchOrder
from mlx_parallm.training.mezo.estimator import Estimator, step_seed
from mlx_parallm.training.objectives import Measure, Scores, scores
from mlx_parallm.training.records import Example, Mode
from mlx_parallm.training.session import NUM_MEASURED, NUM_SAMPLES
from mlx_parallm.training.settings import MezoSettings
from mlx_parallm.training.step_forwards import StepForwards
from mlx_parallm.types.training import (
    Distribution,
    FirstFactors,
    PairResult,
    Segment,
    TrainableInfo,
    TrainableSpec,
    num_tokens,
)
from mlx_parallm.worker.pooling.encoder_adapters import EncoderAdapters
from mlx_parallm.worker.training.directions import Copies, Directions
from mlx_parallm.worker.training.frozen_prefix import FrozenPrefix
from mlx_parallm.worker.training.layer_choice import first_factors, trained_layers
from mlx_parallm.worker.training.pair_forwards import PairForwards
from mlx_parallm.worker.training.prefix_pool import PrefixPool
from mlx_parallm.worker.training.sessions import TrainingSessions
from mlx_parallm.worker.training.trainable import TrainableAdapter
from mlx_parallm.worker.training_ops import (
    ApplySteps,
    CloseTraining,
    MeasureInputs,
    OpenTraining,
    PairForward,
)

MODEL, KEEPER = "model", "keeper"
# EVALUATED: texts of one forward of an evaluation.
EVALUATED = 256
# BACKWARD: forwards that a gradient counts as, besides its own forward.
BACKWARD = 2
# MAX_NORM: longest gradient of first order; a longer one is cut to it.
MAX_NORM = 1.0

#: ``Logits`` turns the head's result for an input, of either array type, into logits ``[labels]``.
Logits = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """Examples, and how the results of a head become logits.

    Attributes:
        train: examples to train on.
        test: examples to evaluate on.
        logits: see ``Logits``.
        dev: examples to choose a point of the curve by; empty: none are evaluated.
    """

    train: Sequence[Example]
    test: Sequence[Example]
    logits: Logits = lambda result: result.reshape(-1)
    dev: Sequence[Example] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A way to train an adapter.

    Attributes:
        spec: the adapter.
        estimator: how a session estimates gradients; None: first order.
        learning_rate: of first order; it falls to 0 linearly.
        measure: what a session makes small.
        steps: how many are made.
        batch_size: examples of a step.
        evaluate_every: steps between two points of the curve.
    """

    spec: TrainableSpec
    estimator: MezoSettings | None = None
    learning_rate: float = 2e-3
    measure: Measure = Measure.CROSS_ENTROPY
    steps: int
    batch_size: int
    evaluate_every: int

    @property
    def forwards_of_step(self) -> int:
        """Forwards of one text in a step."""
        if self.estimator is None:
            return (1 + BACKWARD) * self.batch_size
        segments = Estimator(self.estimator).segments(self.batch_size)
        return sum(len(segment.rows) for segment in segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A point of a learning curve.

    Attributes:
        step: steps so far.
        forwards: forwards of one text so far; a gradient counts as three.
        seconds: of all steps so far, without evaluations.
        train_loss: mean loss of the batches since the last point; None at the first point.
        loss: mean cross entropy of the test examples.
        accuracy: share of test examples whose label was predicted.
        zero_steps: steps so far whose estimate of the gradient was exactly 0.
        dev_accuracy: as ``accuracy``, of the examples to choose by; None if there are none.
    """

    step: int
    forwards: int
    seconds: float
    train_loss: float | None
    loss: float
    accuracy: float
    zero_steps: int
    dev_accuracy: float | None = None


class Run(Protocol):
    """An adapter that is being trained."""

    def step(self, number: int, examples: Sequence[Example]) -> tuple[float, bool]:
        """Make step ``number``; return its loss and whether its estimate was exactly 0."""
        ...

    def evaluate(self, examples: Sequence[Example]) -> Scores:
        """Return how well the examples' labels are predicted."""
        ...

    def close(self) -> None:
        """Forget the adapter."""
        ...


class Learner:
    """Trains adapters of one model on one problem."""

    def __init__(self, model: EncoderAdapters, problem: Problem, cache_bytes: int) -> None:
        """Keep up to ``cache_bytes`` of what enters the lowest trained layers."""
        self._model, self._problem = model, problem
        self._cache_bytes = cache_bytes
        self._sessions = TrainingSessions(model)
        self._is_kept = False

    def curve(self, method: Method, seed: int) -> Iterator[Point]:
        """Train and yield the points of the curve, the first one before any step."""
        self._keep(method)
        problem, sessions = self._problem, self._sessions
        run: Run
        if method.estimator is None:
            run = _FirstOrder(self._model, sessions.pool, problem, method, seed)
        else:
            run = _Session(sessions, problem, method, seed, self._cache_bytes)
        try:
            yield from _points(run, problem, method, seed)
        finally:
            run.close()

    def _keep(self, method: Method) -> None:
        """Open a session that keeps the states of texts from one run to the next."""
        if not self._is_kept:
            opening = OpenTraining(
                model=MODEL,
                session=KEEPER,
                spec=method.spec,
                distribution=Distribution.RADEMACHER,
                cache_bytes=self._cache_bytes,
            )
            self._sessions.begin(opening).wait()
            self._is_kept = True


def _points(run: Run, problem: Problem, method: Method, seed: int) -> Iterator[Point]:
    lengths = [num_tokens(example.input) for example in problem.train]
    batches = Batches(lengths, method.batch_size, BatchOrder.RANDOM, seed)
    losses: list[float] = []
    seconds, zero_steps = 0.0, 0

    def point(step: int) -> Point:
        result = run.evaluate(problem.test)
        assert result.accuracy is not None, "there are labels"
        return Point(
            step=step,
            forwards=step * method.forwards_of_step,
            seconds=seconds,
            train_loss=statistics.fmean(losses) if losses else None,
            loss=result.loss,
            accuracy=result.accuracy,
            zero_steps=zero_steps,
            dev_accuracy=run.evaluate(problem.dev).accuracy if problem.dev else None,
        )

    yield point(0)
    for number in range(method.steps):
        examples = [problem.train[row] for row in batches.of_step(number)]
        begin_s = time.perf_counter()
        loss, is_zero = run.step(number, examples)
        seconds += time.perf_counter() - begin_s
        losses.append(loss)
        zero_steps += is_zero
        if (number + 1) % method.evaluate_every == 0 or number + 1 == method.steps:
            yield point(number + 1)
            losses.clear()


class _Session:
    """A training session, in the forwards that a server makes. Implements ``Run``."""

    def __init__(
        self,
        sessions: TrainingSessions,
        problem: Problem,
        method: Method,
        seed: int,
        cache_bytes: int,
    ) -> None:
        assert method.estimator is not None, "first order is no session"
        self._sessions, self._problem, self._method, self._seed = sessions, problem, method, seed
        self._name = f"session-{seed}"
        self._estimator = Estimator(method.estimator)
        spec, inputs = replace(method.spec, seed=seed), [example.input for example in problem.train]
        factors = None
        if spec.init is FirstFactors.ACTIVATIONS:
            measured = inputs[:NUM_MEASURED]
            measure = MeasureInputs(model=MODEL, session=self._name, spec=spec, inputs=measured)
            factors = sessions.begin(measure).wait()
        opening = OpenTraining(
            model=MODEL,
            session=self._name,
            spec=spec,
            distribution=method.estimator.distribution,
            cache_bytes=cache_bytes,
            samples=inputs[:NUM_SAMPLES],
            factors=factors,
        )
        self._info: TrainableInfo = sessions.begin(opening).wait()

    def step(self, number: int, examples: Sequence[Example]) -> tuple[float, bool]:
        """See ``Run``."""
        settings = self._estimator.settings
        segments = self._estimator.segments(len(examples))
        forwards = StepForwards.of(Mode.PAIRED, self._info.forwards, examples, segments)
        seed = step_seed(self._seed, number)
        results: list[PairResult] = []
        for part in forwards.parts:
            inputs = [examples[row].input for row in part.rows]
            results.append(self._forward(inputs, part.segments, seed, settings))
        estimate = self._estimator.estimate(forwards.losses(results, self._method.measure).means)
        assert estimate.is_finite, f"step {number + 1} has a loss that is not finite"
        made = self._estimator.step(number, seed, estimate)
        steps = ApplySteps(model=MODEL, session=self._name, steps=[made])
        self._sessions.begin(steps).wait()
        loss = (estimate.loss_plus + estimate.loss_minus) / 2
        return loss, not any(estimate.slopes)

    def evaluate(self, examples: Sequence[Example]) -> Scores:
        """See ``Run``."""
        settings = replace(self._estimator.settings, num_directions=1)
        return _evaluated(
            examples,
            lambda inputs: (
                self._forward(
                    inputs, [Segment(None, 1, tuple(range(len(inputs))))], 0, settings
                ).results
            ),
        )

    def _forward(
        self,
        inputs: Sequence[Any],
        segments: Sequence[Segment],
        seed: int,
        settings: MezoSettings,
    ) -> PairResult:
        """Return the logits of all segments' rows."""
        op = PairForward(
            model=MODEL,
            session=self._name,
            inputs=inputs,
            segments=segments,
            seed=seed,
            num_directions=settings.num_directions,
            epsilon=settings.epsilon,
        )
        result: PairResult = self._sessions.begin(op).wait()
        return replace(result, results=[self._problem.logits(row) for row in result.results])

    def close(self) -> None:
        """See ``Run``."""
        self._sessions.begin(CloseTraining(model=MODEL, session=self._name)).wait()


class _FirstOrder:
    """Adam on the gradient of the mean loss. Implements ``Run``."""

    def __init__(
        self,
        model: EncoderAdapters,
        pool: PrefixPool,
        problem: Problem,
        method: Method,
        seed: int,
    ) -> None:
        spec = method.spec
        layers = trained_layers(model, spec)
        self._model, self._problem = model, problem
        self._adapter = TrainableAdapter(
            layers,
            first_factors(layers, seed),
            scale=spec.alpha / spec.rank,
            trains_first=spec.trains_first,
        )
        prefix = FrozenPrefix(model, self._adapter.layers, pool)
        self._forwards = PairForwards(model, self._adapter, prefix)
        schedule = optim.linear_schedule(method.learning_rate, 0.0, method.steps)
        self._adam = optim.Adam(schedule)

    def step(self, number: int, examples: Sequence[Example]) -> tuple[float, bool]:
        """See ``Run``."""
        del number
        inputs = [example.input for example in examples]
        labels = mx.array([example.label for example in examples])

        def loss(theta: mx.array) -> mx.array:
            job = self._model.changed_job(inputs, self._adapter.stacks(theta[None]))
            logits = mx.stack([self._problem.logits(result) for result in job.lazy_results])
            return nn.losses.cross_entropy(logits, labels, reduction="mean")

        value, gradient = mx.value_and_grad(loss)(self._adapter.theta)
        gradients, norm = optim.clip_grad_norm({"theta": gradient}, MAX_NORM)
        changed = self._adam.apply_gradients(gradients, {"theta": self._adapter.theta})
        self._adapter.theta = changed["theta"]
        mx.eval(self._adapter.theta, self._adam.state, value, norm)
        return float(np.array(value)), not np.array(norm)

    def evaluate(self, examples: Sequence[Example]) -> Scores:
        """See ``Run``."""

        def results(inputs: Sequence[Any]) -> list[np.ndarray]:
            rows, theta = tuple(range(len(inputs))), self._adapter.theta
            along = Directions(0, 1, theta.size, Distribution.RADEMACHER)
            copies = Copies(theta, along, [Segment(None, 1, rows)], 0.0)
            logits = self._forwards.begin(inputs, [rows], copies).wait().results
            return [self._problem.logits(row) for row in logits]

        return _evaluated(examples, results)

    def close(self) -> None:
        """See ``Run``."""


def _evaluated(
    examples: Sequence[Example], logits: Callable[[Sequence[Any]], Sequence[np.ndarray]]
) -> Scores:
    """Return the scores of examples, in forwards of neighbours in length."""
    ordered = sorted(examples, key=lambda example: num_tokens(example.input))
    results: list[np.ndarray] = []
    for begin in range(0, len(ordered), EVALUATED):
        results += logits([example.input for example in ordered[begin : begin + EVALUATED]])
    return scores(results, [example.label for example in ordered])
