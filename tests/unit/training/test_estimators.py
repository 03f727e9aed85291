"""Estimates of gradients, and the steps that they lead to, on a loss that is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.training.mezo.estimator import Estimator
from mlx_parallm.training.settings import PAPER, MezoSettings, Sides, StepChanges
from mlx_parallm.types.training import Segment

SIZE = 6
SLOPE = np.array([1.0, -2.0, 0.5, 0.0, 3.0, -1.0])


def linear(theta: np.ndarray) -> float:
    """Return a loss whose gradient is ``SLOPE`` everywhere."""
    return float(theta @ SLOPE)


def measured(
    estimator: Estimator, loss: Callable[[np.ndarray], float], along: np.ndarray, theta: np.ndarray
) -> list[float]:
    """Return the loss of each segment of a batch of as many rows as directions."""
    settings = estimator.settings
    return [
        loss(theta)
        if segment.direction is None
        else loss(theta + segment.sign * settings.epsilon * along[segment.direction])
        for segment in estimator.segments(settings.num_directions)
    ]


@pytest.mark.parametrize("sides", Sides)
@pytest.mark.parametrize("splits_batch", [False, True])
def test_slopes_are_projections_of_the_gradient(sides: Sides, splits_batch: bool) -> None:
    settings = MezoSettings(sides=sides, num_directions=3, splits_batch=splits_batch)
    along = np.random.default_rng(0).choice([-1.0, 1.0], (3, SIZE))
    estimator = Estimator(settings)
    estimate = estimator.estimate(measured(estimator, linear, along, np.zeros(SIZE)))
    assert estimate.slopes == pytest.approx(along @ SLOPE)


@pytest.mark.parametrize("sides", Sides)
@pytest.mark.parametrize("normalises", [False, True])
def test_steps_descend(sides: Sides, normalises: bool) -> None:
    settings = MezoSettings(
        sides=sides,
        num_directions=2,
        normalises=normalises,
        learning_rate=0.02 if normalises else 0.05,
        decay_steps=300,
    )
    estimator, theta = Estimator(settings), np.full(SIZE, 2.0)
    draw = np.random.default_rng(1)

    def bowl(at: np.ndarray) -> float:
        return float(at @ at)

    for number in range(300):
        along = draw.choice([-1.0, 1.0], (2, SIZE))
        estimate = estimator.estimate(measured(estimator, bowl, along, theta))
        step = estimator.step(number, number, estimate)
        theta = step.keep * theta - np.array(step.coefficients) @ along
    assert bowl(theta) < 0.05 * bowl(np.full(SIZE, 2.0))


def test_a_step_of_the_paper_is_algorithm_1() -> None:
    estimator = Estimator(PAPER)
    assert estimator.segments(2) == (Segment(0, 1, (0, 1)), Segment(0, -1, (0, 1)))
    estimate = estimator.estimate([0.75, 0.25])
    assert estimate.slopes == ((0.75 - 0.25) / (2 * 1e-3),)
    step = estimator.step(99_999, 7, estimate)
    assert (step.seed, step.coefficients, step.keep) == (7, [1e-4 * 250.0], 1.0)


def test_parts_of_a_batch_are_equal_and_cover_it() -> None:
    settings = MezoSettings(num_directions=2, splits_batch=True)
    segments = Estimator(settings).segments(4)
    assert segments == (
        Segment(0, 1, (0, 1)),
        Segment(0, -1, (0, 1)),
        Segment(1, 1, (2, 3)),
        Segment(1, -1, (2, 3)),
    )
    for batch_size in (0, 1, 5):
        with pytest.raises(ValueError, match="equal parts"):
            Estimator(settings).segments(batch_size)


def test_one_side_shares_the_copy_without_a_perturbation() -> None:
    settings = MezoSettings(sides=Sides.ONE_SIDED, num_directions=3)
    segments = Estimator(settings).segments(2)
    assert [segment.direction for segment in segments] == [0, 1, 2, None]
    assert {segment.rows for segment in segments} == {(0, 1)}


@given(
    slopes=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5),
    scale=st.floats(1e-3, 1e3),
)
def test_normalised_steps_do_not_depend_on_the_scale_of_the_loss(
    slopes: list[float], scale: float
) -> None:
    settings = MezoSettings(num_directions=len(slopes), epsilon=0.5)
    steps = []
    for factor in (1.0, scale):
        estimator = Estimator(settings)
        losses = [sign * factor * slope / 2 for slope in slopes for sign in (1, -1)]
        steps.append(estimator.step(0, 0, estimator.estimate(losses)).coefficients)
    assert steps[0] == pytest.approx(steps[1], rel=1e-6, abs=1e-9)
    assert np.linalg.norm(steps[0]) <= settings.learning_rate * (1 + 1e-9)


def test_an_interrupted_session_goes_on_as_if_it_had_not_been() -> None:
    settings = MezoSettings()
    whole = Estimator(settings)
    estimates = [whole.estimate([slope, 0.0]) for slope in (1.0, 0.1, 3.0)]
    steps = [whole.step(number, 0, estimate) for number, estimate in enumerate(estimates)]
    first = Estimator(settings)
    first.step(0, 0, estimates[0])
    later = Estimator(settings, first.mean_square)
    assert [later.step(number, 0, estimates[number]) for number in (1, 2)] == steps[1:]


def test_the_learning_rate_falls_to_zero() -> None:
    settings = MezoSettings(learning_rate=0.5, decay_steps=4, weight_decay=0.1)
    assert [settings.rate(step) for step in (0, 2, 4, 9)] == [0.5, 0.25, 0.0, 0.0]
    estimator = Estimator(settings)
    estimate = estimator.estimate([1.0, 0.0])
    keeps = [estimator.step(number, 0, estimate).keep for number in (0, 4)]
    assert keeps == [pytest.approx(0.95), 1.0]


def test_a_step_has_settings_of_its_own() -> None:
    settings = MezoSettings(learning_rate=0.5, weight_decay=0.1, normalises=False)
    estimator, changes = Estimator(settings), StepChanges(epsilon=0.25, learning_rate=2.0)
    estimate = estimator.estimate([1.0, 0.0], changes)
    assert estimate.slopes == (2.0,)
    step = estimator.step(0, 7, estimate, changes)
    assert (step.coefficients, step.keep) == ([4.0], 0.95), "the log has no factor of decay"
    assert estimator.step(1, 7, estimate).coefficients == [1.0]


def test_equal_losses_are_no_step() -> None:
    estimator = Estimator(MezoSettings(num_directions=2))
    step = estimator.step(0, 0, estimator.estimate([1.0] * 4))
    assert step.coefficients == [0.0, 0.0]


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_losses_that_are_no_numbers_are_noticed(wrong: float) -> None:
    estimator = Estimator(MezoSettings())
    assert estimator.estimate([1.0, 0.5]).is_finite
    assert not estimator.estimate([wrong, 0.5]).is_finite
