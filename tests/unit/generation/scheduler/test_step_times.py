"""Which steps are learned from, and together with which others."""

from __future__ import annotations

import pytest

from mlx_parallm.config import SchedulerConfig
from mlx_parallm.generation.scheduler.step_cost import StepWork
from mlx_parallm.generation.scheduler.step_times import StepTimes
from mlx_parallm.types.model_input import InputStages
from mlx_parallm.types.step import Moves, ScheduledBatch, ScheduledSequence
from tests.step_simulator import SimulatedDevice

ROW, CHUNK = (500, 1), (0, 400)
DECODE_S, MIXED_S = 0.005, 0.021
MOVES = {
    "blocks": Moves(filled=((0, b"kv"),)),
    "stages": Moves(
        stages=(InputStages(run=0, slots=(0,), num_stages=1, is_last=True, tokens=64.0),)
    ),
}


def step(*rows: tuple[int, int], moves: Moves | None = None) -> ScheduledBatch:
    sequences = tuple(
        ScheduledSequence(
            seq_id=number, slot=number, start=start, token_ids=(0,) * count, block_table=(0,)
        )
        for number, (start, count) in enumerate(rows)
    )
    return ScheduledBatch(step_id=0, sequences=sequences, moves=moves or Moves())


def mixed_s(times: StepTimes) -> float:
    assert times._cost is not None
    return times._cost.predict(StepWork.of([ROW, CHUNK]))


def taught(times: StepTimes) -> StepTimes:
    for _ in range(20):
        times.observe(step(ROW), DECODE_S)
        times.observe(step(ROW, CHUNK), MIXED_S)
    assert mixed_s(times) == pytest.approx(MIXED_S, rel=0.01)
    return times


@pytest.mark.parametrize("moves", MOVES)
def test_a_step_is_not_learned_with_one_that_did_not_follow_it(moves: str) -> None:
    times = taught(StepTimes(SchedulerConfig(max_decode_stall_ms=30), None))
    for _ in range(20):
        # Its time is seen as that of the step with moves.
        times.observe(step(ROW, CHUNK), 0.001, is_end_known=False)
        times.observe(step(ROW, moves=MOVES[moves]), 0.03)
        times.observe(step(ROW), DECODE_S)
    assert mixed_s(times) == pytest.approx(MIXED_S, rel=0.02)


def test_a_failed_step_has_no_neighbours() -> None:
    device = SimulatedDevice(lambda *_: 0.005, SchedulerConfig(max_decode_stall_ms=30))
    times = taught(device.scheduler._times)
    for number in range(20):
        times.observe(step(ROW, CHUNK), 0.001, is_end_known=False)
        device.add(str(number), 20, 5)
        batch = device.scheduler.schedule()
        assert batch is not None
        device.scheduler.fail(batch, "out of memory")
        times.observe(step(ROW), DECODE_S)
    assert mixed_s(times) == pytest.approx(MIXED_S, rel=0.02)


def test_where_few_decode_steps_are_observed_neighbours_are_learned_together() -> None:
    """Check it for a tower without a bound, where a step's time is seen with the next one's."""
    times = taught(StepTimes(SchedulerConfig(), None, has_tower=True))
    for _ in range(20):
        times.observe(step(ROW, CHUNK), 0.001, is_end_known=False)
        times.observe(step(ROW), DECODE_S + MIXED_S - 0.001, is_end_known=False)
        for _ in range(9):
            times.observe(step(ROW), DECODE_S, is_end_known=False)
    assert mixed_s(times) == pytest.approx(MIXED_S, rel=0.02)
