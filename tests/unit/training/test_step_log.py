"""The log of steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.training.mezo.log import StepLog
from mlx_parallm.types.training import Step

steps = st.lists(
    st.tuples(st.integers(0, 2**64 - 1), st.lists(st.floats(width=32), min_size=3, max_size=3)),
    max_size=6,
)


def keep(number: int) -> float:
    return 1 - number / 100


@given(records=steps)
def test_what_was_written_is_read(records: list[tuple[int, list[float]]]) -> None:
    log = StepLog(3, keep)
    written = [Step(seed, numbers, keep(at)) for at, (seed, numbers) in enumerate(records)]
    content = b"".join(log.record(step) for step in written)
    assert len(content) == (8 + 4 * 3) * len(records)
    for read, step in zip(log.steps(content), written, strict=True):
        assert (read.seed, read.keep) == (step.seed, step.keep)
        np.testing.assert_array_equal(read.coefficients, step.coefficients)


@pytest.mark.parametrize("cut", range(13))
def test_a_record_that_was_cut_off_is_ignored(cut: int) -> None:
    log = StepLog(1, lambda _: 1.0)
    content = log.record(Step(1, [0.5])) + log.record(Step(2, [0.25]))
    whole = content[: len(content) - cut]
    assert [step.seed for step in log.steps(whole)] == ([1, 2] if cut == 0 else [1])
    assert log.whole_bytes(whole) == log.record_bytes * (2 if cut == 0 else 1)


def test_coefficients_are_those_that_are_applied() -> None:
    log = StepLog(1, lambda _: 1.0)
    rounded = log.rounded(Step(3, [0.1], 0.5))
    assert rounded == Step(3, [float(np.float32(0.1))], 0.5)
    assert log.steps(log.record(rounded))[0].coefficients == rounded.coefficients
