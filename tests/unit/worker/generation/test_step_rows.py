"""Rows of steps that are built while the step before is submitted only decode."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_parallm.types.model_input import InputRows
from mlx_parallm.types.request import SamplingParams
from mlx_parallm.types.step import SampleSpec, ScheduledSequence
from mlx_parallm.worker.generation.step_rows import StepRows


def row(seq_id: int = 1, **fields: Any) -> ScheduledSequence:
    """Return a decode row of a greedy sample."""
    spec = SampleSpec(
        params=SamplingParams(temperature=0.0),
        seed=0,
        position=3,
        prompt_ids=(),
        output_ids=(),
    )
    plain: dict[str, Any] = {"start": 3, "token_ids": (5,), "block_table": (0,), "sample": spec}
    return ScheduledSequence(seq_id=seq_id, slot=seq_id, **plain | fields)


def test_decode_rows_are_plain() -> None:
    assert StepRows([row(1), row(2)]).are_plain


@pytest.mark.parametrize(
    "fields",
    [
        # The forward of a prompt is the model's own code.
        {"start": 0},
        {"token_ids": (5, 6)},
        {"inputs": (InputRows(slot=0, first_row=0, num_rows=1, offset=0),)},
        {"values": True},
        {"sample": None},
        {"target_ids": (7,)},
    ],
    ids=str,
)
def test_other_rows_are_not(fields: dict[str, Any]) -> None:
    rows = StepRows([row(1), row(2, **fields), row(3)])
    assert not rows.are_plain
    assert rows.sampled_ids == ([1, 3] if "sample" in fields else [1, 2, 3])
