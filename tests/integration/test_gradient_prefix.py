"""States before the lowest trained layer change no bit of a gradient, whatever is evicted when."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.types.gradients import GradientForm, LossKind, LossSpec
from mlx_parallm.worker.training.prefix_pool import PrefixPool
from mlx_parallm.worker.training.trained_model import TrainedModel
from tests.builders.architectures.configs import VOCAB_SIZE, config_of
from tests.builders.architectures.trial import build
from tests.gradient_sessions import GradientSession, choice_rows, trained_decoder

NUM_ROWS = 6
# WIDTH: bytes of a token's states: 64 numbers, float32.
WIDTH = 64 * 4
# NEVER: a number of stages after which the pool is emptied that no gradient has.
NEVER = 100


@functools.cache
def decoder() -> TrainedModel:
    return trained_decoder(build(config_of("llama")), VOCAB_SIZE)


@functools.cache
def opened(kind: LossKind, room: int | None) -> GradientSession:
    """Return a session whose pool has room for so many tokens; None: without a pool."""
    pool = None if room is None else PrefixPool(room * WIDTH)
    inputs, _ = choice_rows(kind, VOCAB_SIZE)
    session = GradientSession(decoder(), inputs[:2], pool=pool, top=2)
    assert session.session.gradients.form is GradientForm.STAGED
    return session


def gradient(
    session: GradientSession,
    kind: LossKind,
    rows: Sequence[int],
    *,
    staged: bool = False,
    emptied_after: int = NEVER,
) -> np.ndarray:
    """Return the gradient of rows; the pool is emptied after so many stages."""
    inputs, targets = choice_rows(kind, VOCAB_SIZE, NUM_ROWS)
    session.session.gradients.drop()
    chosen = [inputs[row] for row in rows], [targets[row] for row in rows]
    job = session.begin(LossSpec(kind=kind), chosen)
    while staged and job.num_stages > 1:
        job.advance()
        emptied_after -= 1
        if not emptied_after and session.session.prefix.pool is not None:
            session.session.prefix.pool.clear()
    job.wait()
    total = session.session.gradients.sum
    assert total is not None
    return np.array(total)


@functools.cache
def anew(rows: tuple[int, ...]) -> np.ndarray:
    """Return the gradient with states that are all computed anew."""
    return gradient(opened(LossKind.DPO, 0), LossKind.DPO, rows)


BATCHES = st.lists(
    st.tuples(
        st.lists(st.integers(0, NUM_ROWS - 1), min_size=1, max_size=4),
        st.booleans(),
        st.integers(0, 20),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=12)
@given(batches=BATCHES, room=st.integers(0, 100))
def test_gradients_are_those_of_states_that_are_computed_anew(
    batches: list[tuple[list[int], bool, int]], room: int
) -> None:
    session = opened(LossKind.DPO, NEVER)
    session.session.prefix.pool = PrefixPool(room * WIDTH)
    for rows, staged, emptied_after in batches:
        own = gradient(session, LossKind.DPO, rows, staged=staged, emptied_after=emptied_after)
        np.testing.assert_array_equal(own, anew(tuple(rows)))


@pytest.mark.parametrize("staged", [False, True])
def test_a_text_has_the_gradient_of_a_session_that_keeps_nothing(staged: bool) -> None:
    """Several texts together may differ in the last bits: BLAS sums by the number of rows."""
    kind = LossKind.LIKELIHOOD
    kept, without = opened(kind, NEVER), opened(kind, None)
    pool = kept.session.prefix.pool
    assert pool is not None
    pool.clear()
    for row in range(NUM_ROWS):
        # The second time, its states are found.
        for _ in range(2):
            own = gradient(kept, kind, [row], staged=staged)
            np.testing.assert_array_equal(own, gradient(without, kind, [row]))
    assert len(pool) == NUM_ROWS
