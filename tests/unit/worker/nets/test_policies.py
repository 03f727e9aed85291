"""Policies that were written from Stable-Baselines3's, beside what SB3 computes with them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.types.nets import ActResult, Distribution
from tests.golden_policies import NAMES, GoldenPolicy, to_numpy

RECURRENT = [name for name in NAMES if name.startswith("recurrent")]
SCORES = {ActResult.LOG_PROBS, ActResult.ENTROPY, ActResult.VALUES}


@pytest.fixture(params=NAMES, scope="module")
def golden(request: pytest.FixtureRequest) -> GoldenPolicy:
    return GoldenPolicy(request.param)


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def test_deterministic_actions_are_equal(golden: GoldenPolicy) -> None:
    results, _ = golden.act(greedy=True)
    is_whole = golden.policy.has_choices or golden.policy.distribution is Distribution.BERNOULLI
    for key, name in (("actions", "likeliest"), ("actions_for_env", "likeliest_for_env")):
        assert results[key].shape == golden.values[name].shape
        assert_close(results[key], golden.values[name], 0 if is_whole else 1e-5)
    if ActResult.LOG_PROBS in golden.policy.results:
        assert_close(results["log_probs"], golden.values["likeliest_log_probs"])


def test_judged_actions_have_the_same_scores(golden: GoldenPolicy) -> None:
    results, _ = golden.act(actions=mx.array(golden.values["actions"]))
    np.testing.assert_array_equal(results["actions"], golden.values["actions"])
    assert_close(results["actions_for_env"], golden.values["for_env"])
    compared = SCORES & golden.values.keys()
    assert compared == SCORES & golden.policy.results
    for key in compared:
        assert_close(results[key], golden.values[key])


def test_drawn_actions_are_allowed(golden: GoldenPolicy) -> None:
    actions = golden.act()[0]["actions"]
    assert actions.shape == golden.values["actions"].shape
    mask = golden.values.get("mask")
    if mask is not None:
        starts = np.cumsum([0, *golden.policy.sizes[:-1]])
        chosen = actions.reshape(len(mask), -1) + starts
        assert np.take_along_axis(mask, chosen, axis=1).all()


@pytest.mark.parametrize("name", RECURRENT)
def test_next_states_are_the_same(name: str) -> None:
    golden = GoldenPolicy(name)
    _, states = golden.act()
    expected = golden.named("next_states")
    assert states.keys() == expected.keys()
    for key, state in expected.items():
        assert_close(states[key], state)


@pytest.mark.parametrize("name", RECURRENT)
def test_single_steps_compute_what_a_chunk_does(name: str) -> None:
    golden = GoldenPolicy(name)
    starts = golden.values["episode_start"]
    assert starts[:, 1:].any(), "no episode starts in the middle"
    chunk, after = map(to_numpy, golden.forward(golden.inputs, golden.named("states"), starts))
    states = golden.named("states")
    for time in range(starts.shape[1]):
        now = {key: array[:, time] for key, array in golden.inputs.items()}
        outputs, states = map(to_numpy, golden.forward(now, states, starts[:, time]))
        for key, array in outputs.items():
            of_chunk = chunk[key][:, time] if chunk[key].ndim > array.ndim else chunk[key]
            assert_close(array, of_chunk, 1e-6)
    for key, state in after.items():
        assert_close(states[key], state, 1e-6)
