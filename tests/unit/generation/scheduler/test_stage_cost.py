"""The seconds of stages are learned from whole steps, of which rows take a part."""

from __future__ import annotations

import pytest

from mlx_parallm.generation.scheduler.stage_cost import GROWTH, StageCost

ROWS_S = 0.01
PER_TOKEN_S, FIXED_S = 5e-5, 0.002


def observe(cost: StageCost, *tokens: float) -> None:
    """Observe steps with stages of these costs."""
    for each in tokens:
        cost.observe(each, ROWS_S + FIXED_S + each * PER_TOKEN_S, ROWS_S)


def test_stages_cost_what_steps_took_beyond_their_rows() -> None:
    cost = StageCost()
    observe(cost, *[100, 1000] * 20)
    assert cost.predict(500) == pytest.approx(FIXED_S + 500 * PER_TOKEN_S, rel=0.05)
    assert cost.predict(0) == 0
    assert cost.tokens_within(FIXED_S + 600 * PER_TOKEN_S) == pytest.approx(600, rel=0.05)
    assert cost.tokens_within(FIXED_S / 2) == 0


@pytest.mark.parametrize("seconds", [0.0, 0.5 * ROWS_S, ROWS_S])
def test_a_step_shorter_than_its_rows_does_not_make_stages_free(seconds: float) -> None:
    cost = StageCost()
    cost.observe(1000, seconds, ROWS_S)
    observe(cost, *[1000] * 10)
    assert cost.predict(1000) > 0.5 * 1000 * PER_TOKEN_S


def test_a_step_that_was_interrupted_is_not_believed() -> None:
    cost = StageCost()
    observe(cost, *[100, 1000] * 20)
    before = cost.predict(1000)
    cost.observe(1000, 100.0, ROWS_S)
    assert cost.predict(1000) < 3 * before


def test_a_step_has_few_more_stages_than_recent_ones() -> None:
    cost = StageCost()
    assert cost.tokens_within(1.0) == 0
    observe(cost, 100)
    assert cost.tokens_within(1.0) == GROWTH * 100
    observe(cost, 200, 50)
    assert cost.tokens_within(1.0) == GROWTH * 150
