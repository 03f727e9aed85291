"""The seconds of stages are learned from whole steps, of which rows take a part."""

from __future__ import annotations

import pytest

from mlx_parallm.generation.scheduler.step_cost import STAGE_GROWTH, StageCost

ROWS_S = 0.01
PER_TOKEN_S, PER_BEGUN_S, FIXED_S = 5e-5, 1e-5, 0.002
WHOLE = 1000


def observe(cost: StageCost, *tokens: float, begun: float = 0) -> None:
    """Observe steps with stages of these costs."""
    for each in tokens:
        seconds = FIXED_S + each * PER_TOKEN_S + begun * PER_BEGUN_S
        cost.observe(each, begun, ROWS_S + seconds, ROWS_S)


def observe_images(cost: StageCost) -> None:
    """Observe images that are computed in unequal parts."""
    for _ in range(20):
        observe(cost, 100, begun=WHOLE)
        observe(cost, 700, 200)


def test_stages_cost_what_steps_took_beyond_their_rows() -> None:
    cost = StageCost()
    observe_images(cost)
    assert cost.predict(500, 0) == pytest.approx(FIXED_S + 500 * PER_TOKEN_S, rel=0.1)
    assert cost.predict(0, 0) == 0
    assert cost.tokens_within(FIXED_S + 300 * PER_TOKEN_S, 0) == pytest.approx(300, rel=0.1)


def test_a_step_that_begins_a_image_computes_less_of_it() -> None:
    cost = StageCost()
    observe_images(cost)
    within_s = FIXED_S + 300 * PER_TOKEN_S
    tokens = cost.tokens_within(within_s, WHOLE)
    assert tokens == pytest.approx(300 - WHOLE * PER_BEGUN_S / PER_TOKEN_S, rel=0.2)
    assert cost.tokens_within(WHOLE * PER_BEGUN_S / 2, WHOLE) == 0
    more_s = cost.predict(100, WHOLE) - cost.predict(100, 0)
    assert more_s == pytest.approx(WHOLE * PER_BEGUN_S, rel=0.2)


@pytest.mark.parametrize("seconds", [0.0, 0.5 * ROWS_S, ROWS_S])
def test_a_step_shorter_than_its_rows_does_not_make_stages_free(seconds: float) -> None:
    cost = StageCost()
    cost.observe(WHOLE, WHOLE, seconds, ROWS_S)
    observe(cost, *[WHOLE] * 10, begun=WHOLE)
    assert cost.predict(WHOLE, WHOLE) > 0.5 * WHOLE * PER_TOKEN_S


def test_a_step_that_was_interrupted_is_not_believed() -> None:
    cost = StageCost()
    observe_images(cost)
    before = cost.predict(WHOLE, 0)
    cost.observe(WHOLE, 0, 100.0, ROWS_S)
    assert cost.predict(WHOLE, 0) < 3 * before


def test_a_step_has_few_more_stages_than_recent_ones() -> None:
    cost = StageCost()
    assert cost.tokens_within(1.0, 0) == 0
    observe(cost, 100)
    assert cost.tokens_within(1.0, 0) == STAGE_GROWTH * 100
    observe(cost, 200, 50)
    assert cost.tokens_within(1.0, 0) == STAGE_GROWTH * 150
