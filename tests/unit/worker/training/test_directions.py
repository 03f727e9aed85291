"""Random directions and steps along them."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.types.training import Distribution, Segment, Step
from mlx_parallm.worker.training.directions import (
    NUMBERS_OF_STAGE,
    Copies,
    Directions,
    directions_of_stage,
    steps_along,
)

SIZE = 1000
REPLAY = """
import sys, hashlib
import mlx.core as mx, numpy as np
from mlx_parallm.types.training import Distribution, Step
from mlx_parallm.worker.training.directions import steps_along
theta, distribution = mx.zeros(1000), Distribution(sys.argv[1])
for step in range(1000):
    coefficients = [1e-3 * (step % 7 - 3), 2e-3]
    *_, theta = steps_along(theta, [Step(2**63 + step, coefficients, 0.999)], distribution)
print(hashlib.sha256(np.array(theta).tobytes()).hexdigest())
"""


def directions(seed: int, count: int, size: int, distribution: Distribution) -> mx.array:
    drawn = Directions(seed, count, size, distribution)
    return mx.stack([drawn.draw(index) for index in range(count)])


def stepped(theta: mx.array, step: Step, distribution: Distribution) -> mx.array:
    *_, after = steps_along(theta, [step], distribution)
    return after


@pytest.mark.parametrize("distribution", Distribution)
def test_directions_have_mean_0_and_variance_1(distribution: Distribution) -> None:
    numbers = np.array(directions(7, 4, 10_000, distribution))
    assert numbers.shape == (4, 10_000)
    assert np.abs(numbers.mean(axis=1)).max() < 0.05
    assert np.abs(numbers.var(axis=1) - 1).max() < 0.05
    assert np.abs(np.corrcoef(numbers) - np.eye(4)).max() < 0.05


def test_rademacher_numbers_are_signs() -> None:
    numbers = np.array(directions(7, 1, SIZE, Distribution.RADEMACHER))
    assert set(numbers.ravel().tolist()) == {1.0, -1.0}


@pytest.mark.parametrize("distribution", Distribution)
def test_seeds_decide_directions(distribution: Distribution) -> None:
    drawn = [np.array(directions(seed, 2, SIZE, distribution)) for seed in (0, 0, 1, 2**64 - 1)]
    assert (drawn[0] == drawn[1]).all()
    assert not (drawn[0] == drawn[2]).all()
    assert not (drawn[2] == drawn[3]).all()


def test_a_step_goes_along_its_directions() -> None:
    theta = mx.arange(SIZE).astype(mx.float32)
    along = np.array(directions(3, 2, SIZE, Distribution.GAUSSIAN))
    after = np.array(stepped(theta, Step(3, [0.5, -0.25], 0.5), Distribution.GAUSSIAN))
    expected = 0.5 * np.arange(SIZE) - 0.5 * along[0] + 0.25 * along[1]
    np.testing.assert_allclose(after, expected, rtol=1e-6, atol=1e-4)


def test_coefficients_of_zero_change_no_bit() -> None:
    theta = mx.random.normal([SIZE], key=mx.random.key(1))
    after = stepped(theta, Step(3, [0.0, 0.0]), Distribution.RADEMACHER)
    assert (after == theta).all().item()


SEGMENTS = [
    Segment(direction, sign, ())
    for direction, sign in [(2, 1), (None, 1), (0, -1), (2, -1), (1, 1)]
]


@pytest.mark.parametrize("distribution", Distribution)
@pytest.mark.parametrize("size", [7, NUMBERS_OF_STAGE // 2, NUMBERS_OF_STAGE + 1])
def test_copies_are_the_same_however_many_stages_draw_them(
    distribution: Distribution, size: int
) -> None:
    theta = mx.random.normal([size], key=mx.random.key(1))
    drawn = Directions(5, 4, size, distribution)
    expected = [
        theta
        if segment.direction is None
        else theta + segment.sign * 1e-3 * drawn.draw(segment.direction)
        for segment in SEGMENTS
    ]
    for num_stages in range(5):
        copies = Copies(theta, drawn, SEGMENTS, 1e-3)
        stages = copies.num_stages
        assert stages == {7: 0, NUMBERS_OF_STAGE // 2: 2}.get(size, 4)
        for left in range(stages, max(0, stages - num_stages), -1):
            assert copies.num_stages == left
            copies.advance()
        for copy, wanted in zip(copies.value(), expected, strict=True):
            assert mx.array_equal(copy, wanted)


def test_a_stage_draws_so_many_numbers() -> None:
    assert directions_of_stage(1) == 16
    assert directions_of_stage(NUMBERS_OF_STAGE // 3) == 3
    assert directions_of_stage(3 * NUMBERS_OF_STAGE) == 1


@pytest.mark.parametrize("distribution", Distribution)
def test_a_thousand_steps_give_the_same_bits_in_another_process(
    distribution: Distribution,
) -> None:
    theta = mx.zeros(SIZE)
    for step in range(1000):
        coefficients = [1e-3 * (step % 7 - 3), 2e-3]
        theta = stepped(theta, Step(2**63 + step, coefficients, 0.999), distribution)
    replayed = subprocess.run(
        [sys.executable, "-c", REPLAY, distribution], capture_output=True, text=True, check=True
    )
    assert replayed.stdout.strip() == hashlib.sha256(np.array(theta).tobytes()).hexdigest()
