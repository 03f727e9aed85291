"""Which examples the steps of a session have."""

from __future__ import annotations

import pytest

from mlx_parallm.training.batches import Batches, BatchOrder
from mlx_parallm.training.mezo.estimator import step_seed

LENGTHS = [3, 50, 4, 60, 5, 70, 6, 80, 7, 90, 8]


@pytest.mark.parametrize("order", BatchOrder)
def test_an_epoch_has_each_example_at_most_once(order: BatchOrder) -> None:
    batches = Batches(LENGTHS, 3, order, seed=7)
    for epoch in range(4):
        drawn = [row for step in range(3) for row in batches.of_step(3 * epoch + step)]
        assert len(set(drawn)) == len(drawn) == 9


@pytest.mark.parametrize("order", BatchOrder)
def test_the_batch_of_a_step_depends_on_the_seed_and_the_number_alone(order: BatchOrder) -> None:
    first, again = (Batches(LENGTHS, 3, order, seed=7) for _ in range(2))
    expected = [list(first.of_step(number)) for number in range(20)]
    assert [list(again.of_step(number)) for number in reversed(range(20))] == expected[::-1]
    other = Batches(LENGTHS, 3, order, seed=8)
    assert [list(other.of_step(number)) for number in range(20)] != expected


def test_neighbours_in_length_share_a_batch() -> None:
    batches = Batches(LENGTHS, 3, BatchOrder.BY_LENGTH, seed=7)
    drawn = [sorted(LENGTHS[row] for row in batches.of_step(step)) for step in range(30)]
    ranks = sorted(LENGTHS)
    assert all(ranks.index(batch[-1]) - ranks.index(batch[0]) <= 4 for batch in drawn)


def test_seeds_of_steps_differ() -> None:
    seeds = {step_seed(seed, number) for seed in range(10) for number in range(100)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**64 for seed in seeds)
    # The log of a session depends on it, so it must not change between versions.
    assert step_seed(0, 0) == step_seed(0, 0) != step_seed(0, 1)
