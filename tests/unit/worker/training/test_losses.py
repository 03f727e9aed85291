"""Losses on the device against those of results that are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.training import objectives
from mlx_parallm.types.gradients import LossKind, LossSpec, LossTarget
from mlx_parallm.types.pooling import PoolingInput
from mlx_parallm.types.training import ChoiceInput, TrainingInput
from mlx_parallm.worker.training.losses import check_rows, row_losses

NUMBERS = st.floats(-3, 3, width=32)
SETTINGS = st.fixed_dictionaries(
    {
        "beta": st.floats(0.01, 2),
        "centring": st.sampled_from([0.0, 0.1]),
        "clip_low": st.floats(0.1, 0.5),
        "clip_high": st.floats(0.1, 0.5),
        "is_clipped": st.booleans(),
        "kl": st.floats(0.01, 1),
    }
)
Row = tuple[Sequence[np.ndarray], Sequence[TrainingInput], LossTarget]


def arrays(size: int) -> st.SearchStrategy[np.ndarray]:
    return st.lists(NUMBERS, min_size=size, max_size=size).map(
        lambda values: np.array(values, np.float32)
    )


@st.composite
def rows(draw: st.DrawFn, kind: LossKind) -> Row:
    """Draw results, inputs and the target of a row."""
    weight, label = draw(NUMBERS), draw(st.integers(0, 2))
    if kind is LossKind.PAIRWISE:
        inputs = [PoolingInput((1,), "classify")] * 2
        target = LossTarget(margin=draw(NUMBERS), weight=weight)
        return [draw(arrays(1)), draw(arrays(1))], inputs, target
    if kind is LossKind.DPO:
        item = ChoiceInput((1,), ((2,), (3,)))
        target = LossTarget(reference=tuple(draw(arrays(2)).tolist()), weight=weight)
        return [draw(arrays(2))], [item], target
    if kind is not LossKind.POLICY:
        item = ChoiceInput((1,), ((2,), (3,), (4,)))
        return [draw(arrays(3))], [item], LossTarget(label=label, weight=weight)
    size = draw(st.integers(1, 4))
    tokens = tuple(range(size))
    weights = (tuple(draw(arrays(size)).tolist()),) if draw(st.booleans()) else ()
    item = ChoiceInput((1,), (tokens,), weights=weights, by_token=True)
    old, reference = (tuple(draw(arrays(size)).tolist()) for _ in range(2))
    target = LossTarget(logprobs=old, reference=reference, advantage=draw(NUMBERS), weight=weight)
    return [draw(arrays(size))], [item], target


@pytest.mark.parametrize("kind", LossKind)
@settings(max_examples=30, deadline=None)
@given(data=st.data(), values=SETTINGS)
def test_losses_are_those_of_known_results(
    kind: LossKind, data: st.DataObject, values: dict[str, Any]
) -> None:
    spec = LossSpec(kind=kind, **values)
    drawn = data.draw(st.lists(rows(kind), min_size=1, max_size=4))
    results = [result for own, _, _ in drawn for result in own]
    inputs = [item for _, own, _ in drawn for item in own]
    targets = [target for _, _, target in drawn]
    check_rows(inputs, spec, targets)
    losses, facts = row_losses(list(map(mx.array, results)), inputs, spec, targets)
    expected, known = objectives.row_losses(results, inputs, spec, targets)
    np.testing.assert_allclose(np.array(losses), expected, rtol=1e-4, atol=1e-3)
    assert facts.keys() == known.keys()
    for name, fact in facts.items():
        np.testing.assert_allclose(np.array(fact), known[name], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kl", [0.0, 0.1])
@pytest.mark.parametrize("far", [-200.0, -1e15])
def test_a_ratio_beyond_float32_that_is_clipped_has_no_gradient(far: float, kl: float) -> None:
    item = ChoiceInput((1,), ((2, 3),), by_token=True)
    # The second token has a ratio of 1, and is all that is learnt.
    target = LossTarget(logprobs=(far, -1.0), reference=(-1.0, -1.0), advantage=1.0)
    spec = LossSpec(kind=LossKind.POLICY, kl=kl)

    def loss(logprobs: mx.array) -> mx.array:
        return row_losses([logprobs], [item], spec, [target])[0].sum()

    value, gradient = mx.value_and_grad(loss)(mx.array([-1.0, -1.0]))
    assert np.isfinite(float(np.array(value)))
    np.testing.assert_allclose(np.array(gradient), [0.0, -1.0])


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_a_divergence_beyond_float32_is_finite(kl: float) -> None:
    item = ChoiceInput((1,), ((2,),), by_token=True)
    target = LossTarget(logprobs=(-200.0,), reference=(-1.0,), advantage=1.0)
    spec = LossSpec(kind=LossKind.POLICY, kl=kl)
    losses, facts = row_losses([mx.array([-200.0])], [item], spec, [target])
    assert np.isfinite(np.array(losses)).all()
    assert np.isfinite(np.array(facts["kl"])).all()
