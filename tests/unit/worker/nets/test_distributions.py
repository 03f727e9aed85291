"""Distributions of actions: frequencies of draws, keys of rows, masks and judged actions."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.types.nets import ActResult, Distribution, PolicySpec
from mlx_parallm.worker.nets.distributions import act

NUM_DRAWS = 100_000
BOUNDS = {"low": (-0.5, -1.0, -2.0), "high": (0.5, 1.0, 3.0)}
POLICIES = {
    "categorical": {},
    "multi_categorical": {"sizes": (2, 1, 3)},
    "bernoulli": {},
    "gaussian": {"log_std": "spread", **BOUNDS},
    "squashed_gaussian": {"log_std": "spread", **BOUNDS},
    "deterministic": BOUNDS,
}
WIDTHS = {"categorical": 5, "multi_categorical": 6}


def policy_of(name: str) -> PolicySpec:
    return PolicySpec(
        distribution=Distribution(name), parameters="out", value="value", **POLICIES[name]
    )


def outputs_of(name: str, *leading: int) -> dict[str, mx.array]:
    random = np.random.default_rng(len(name))
    width = WIDTHS.get(name, 3)
    names = {"out": (*leading, width), "spread": (leading[0], width), "value": (*leading, 1)}
    return {key: mx.array(random.normal(size=shape), mx.float32) for key, shape in names.items()}


def seeds_of(num_rows: int, seed: int = 5, start: int = 0) -> mx.array:
    rows = np.arange(start, start + num_rows)
    return mx.array(np.stack([np.full(num_rows, seed), rows], axis=1).astype(np.uint32))


def act_on(
    policy: PolicySpec, outputs: dict[str, mx.array], *, greedy: bool = False, **more: Any
) -> dict[str, np.ndarray]:
    num_rows = len(outputs["out"])
    flags = {"seeds": seeds_of(num_rows), "is_deterministic": mx.full(num_rows, greedy)}
    return {name: np.array(array) for name, array in act(policy, outputs, **flags | more).items()}


def repeated(array: list[float]) -> mx.array:
    return mx.broadcast_to(mx.array(array), (NUM_DRAWS, len(array)))


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """Return how many standard deviations Pearson's statistic is beyond its mean."""
    used = probs > 0
    assert not counts[~used].any()
    expected = probs[used] * counts.sum()
    degrees = used.sum() - 1
    statistic = (np.square(counts[used] - expected) / expected).sum()
    return (statistic - degrees) / math.sqrt(2 * degrees)


def farthest(draws: np.ndarray, mean: float, std: float) -> float:
    """Return Kolmogorov's distance to a normal distribution, times the root of the number."""
    draws = np.sort((draws - mean) / std)
    exact = 0.5 + 0.5 * np.array([math.erf(x / math.sqrt(2)) for x in draws])
    steps = np.arange(len(draws) + 1) / len(draws)
    distance = max((steps[1:] - exact).max(), (exact - steps[:-1]).max())
    return distance * math.sqrt(len(draws))


def softmax(logits: list[float]) -> np.ndarray:
    exponents = np.exp(np.array(logits) - max(logits))
    return exponents / exponents.sum()


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("leading", [(6,), (6, 4)])
@pytest.mark.parametrize("has_value", [True, False])
def test_results_are_those_that_the_policy_names(
    name: str, leading: tuple[int, ...], has_value: bool
) -> None:
    policy = PolicySpec(
        distribution=Distribution(name),
        parameters="out",
        value="value" if has_value else None,
        **POLICIES[name],
    )
    results = act_on(policy, outputs_of(name, *leading))
    assert {key.partition(".")[0] for key in results} == policy.results
    assert {array.shape[: len(leading)] for array in results.values()} == {leading}
    per_row = {ActResult.VALUES, ActResult.ENTROPY, ActResult.LOG_PROBS} & policy.results
    assert all(results[key].shape == leading for key in per_row)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("leading", [(6,), (6, 4)])
def test_compiled_results_are_the_same(name: str, leading: tuple[int, ...]) -> None:
    outputs = outputs_of(name, *leading)
    traced = mx.compile(partial(act, policy_of(name)))
    compiled = traced(outputs, seeds=seeds_of(6), is_deterministic=mx.zeros(6, mx.bool_))
    for key, array in act_on(policy_of(name), outputs).items():
        np.testing.assert_allclose(np.array(compiled[key]), array, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "deterministic"])
def test_a_row_draws_by_its_own_key(name: str) -> None:
    policy, outputs = policy_of(name), outputs_of(name, 64)
    drawn = act_on(policy, outputs)[ActResult.ACTIONS]
    alone = {key: array[9:10] for key, array in outputs.items()}
    again = act_on(policy, alone, seeds=seeds_of(1, start=9))[ActResult.ACTIONS]
    np.testing.assert_array_equal(again[0], drawn[9])
    other = act_on(policy, outputs, seeds=seeds_of(64, seed=6))[ActResult.ACTIONS]
    assert not np.array_equal(other, drawn)


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "deterministic"])
def test_a_draw_does_not_depend_on_the_number_of_times(name: str) -> None:
    policy, outputs = policy_of(name), outputs_of(name, 64, 5)
    drawn = act_on(policy, outputs)[ActResult.ACTIONS]
    first = outputs | {"out": outputs["out"][:, :2]}
    np.testing.assert_array_equal(act_on(policy, first)[ActResult.ACTIONS], drawn[:, :2])
    without_time = outputs | {"out": outputs["out"][:, 0]}
    np.testing.assert_array_equal(act_on(policy, without_time)[ActResult.ACTIONS], drawn[:, 0])
    width = outputs["out"].shape[-1]
    same = outputs | {"out": mx.zeros((64, 5, width)), "spread": mx.zeros((64, width))}
    repeats = act_on(policy, same)[ActResult.ACTIONS]
    assert not np.array_equal(repeats[:, 0], repeats[:, 1])


def test_choices_are_as_frequent_as_their_probabilities() -> None:
    logits = [0.3, -1.2, 2.0, 0.0, -4.0]
    drawn = act_on(policy_of("categorical"), {"out": repeated(logits), "value": mx.zeros(1)})
    counts = np.bincount(drawn[ActResult.ACTIONS], minlength=5)
    assert chi_square(counts, softmax(logits)) < 4
    assert chi_square(counts, softmax([0.3, -1.2, 2.05, 0.0, -4.0])) > 4


def test_masked_choices_are_never_drawn() -> None:
    logits = [0.3, -1.2, 2.0, 0.0, -4.0]
    mask = [True, True, False, True, False]
    outputs = {"out": repeated(logits), "value": mx.zeros(1)}
    allowed = mx.broadcast_to(mx.array(mask), (NUM_DRAWS, 5))
    drawn = act_on(policy_of("categorical"), outputs, action_mask=allowed)
    counts = np.bincount(drawn[ActResult.ACTIONS], minlength=5)
    probs = softmax([x if keep else -1e8 for x, keep in zip(logits, mask, strict=True)])
    assert chi_square(counts, probs) < 4
    surprise = -np.log(probs, where=probs > 0, out=np.zeros(5))
    np.testing.assert_allclose(drawn[ActResult.ENTROPY], probs @ surprise, rtol=1e-5)
    judged = act_on(
        policy_of("categorical"), outputs, action_mask=allowed, actions=mx.full(NUM_DRAWS, 2)
    )
    assert judged[ActResult.LOG_PROBS].max() < -9e7


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("logit", [-3e38, -1e9, 0.0])
def test_masks_hold_however_small_the_allowed_logits_are(greedy: bool, logit: float) -> None:
    logits = mx.broadcast_to(mx.array([9.0, logit, 1e8]), (NUM_DRAWS, 3))
    mask = mx.broadcast_to(mx.array([False, True, False]), (NUM_DRAWS, 3))
    outputs = {"out": logits, "value": mx.zeros(1)}
    results = act_on(policy_of("categorical"), outputs, greedy=greedy, action_mask=mask)
    assert set(results[ActResult.ACTIONS]) == {1}


def test_noise_of_a_uniform_zero_excludes_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.random, "gumbel", lambda shape, key: mx.full(shape, -mx.inf))
    outputs = {"out": mx.array([[-2.0, 0.5, 0.1]]), "value": mx.zeros(1)}
    mask = mx.array([[True, False, True]])
    results = act_on(policy_of("categorical"), outputs, action_mask=mask)
    assert results[ActResult.ACTIONS].tolist() == [2]


def test_saturated_actions_have_finite_scores() -> None:
    outputs = {
        "out": mx.array([[20.0, -20.0, 1e4]]),
        "spread": mx.full((1, 3), 2.0),
        "value": mx.zeros(1),
    }
    drawn = act_on(policy_of("squashed_gaussian"), outputs)
    assert np.abs(drawn[ActResult.ACTIONS]).tolist() == [[1.0, 1.0, 1.0]]
    judged = act_on(policy_of("squashed_gaussian"), outputs, actions=mx.array([[1.0, -1.0, 1.0]]))
    for results in (drawn, judged):
        assert np.isfinite(results[ActResult.LOG_PROBS]).all()


def test_joint_choices_are_independent() -> None:
    logits = [0.3, -0.3, 5.0, 0.0, 1.0, -1.0]
    outputs = {"out": repeated(logits), "value": mx.zeros(1)}
    first, only, last = act_on(policy_of("multi_categorical"), outputs)[ActResult.ACTIONS].T
    assert not only.any()
    probs = np.outer(softmax(logits[:2]), softmax(logits[3:])).ravel()
    assert chi_square(np.bincount(first * 3 + last, minlength=6), probs) < 4


def test_bits_are_as_frequent_as_their_probabilities() -> None:
    logits = [0.4, -2.0, 1.0]
    outputs = {"out": repeated(logits), "value": mx.zeros(1)}
    bits = act_on(policy_of("bernoulli"), outputs)[ActResult.ACTIONS]
    ones = 1 / (1 + np.exp(-np.array(logits)))
    probs = np.ones(1)
    for one_prob in ones:
        probs = np.outer(probs, [1 - one_prob, one_prob]).ravel()
    assert chi_square(np.bincount(bits @ [4, 2, 1], minlength=8), probs) < 4


@pytest.mark.parametrize("name", ["gaussian", "squashed_gaussian"])
def test_gaussians_are_normal_and_independent(name: str) -> None:
    mean, log_std = [0.2, -0.4, 0.0], [-0.5, 0.1, -1.0]
    outputs = {"out": repeated(mean), "spread": repeated(log_std), "value": mx.zeros(1)}
    actions = act_on(policy_of(name), outputs)[ActResult.ACTIONS].astype(np.float64)
    normal = np.arctanh(actions) if name.startswith("squashed") else actions
    for column in range(3):
        std = math.exp(log_std[column])
        # A sample of the distribution itself is farther with a probability of 0.0007.
        assert farthest(normal[:, column], mean[column], std) < 2
        assert farthest(normal[:, column], mean[column] + 0.02, std) > 2
    assert np.abs(np.corrcoef(normal.T) - np.eye(3)).max() < 4 / math.sqrt(NUM_DRAWS)


def test_neighbouring_seeds_and_rows_are_independent() -> None:
    outputs = {"out": mx.zeros((300, 1)), "spread": mx.zeros((300, 1)), "value": mx.zeros(1)}
    policy = PolicySpec(distribution=Distribution.GAUSSIAN, parameters="out", log_std="spread")
    table = np.array(
        [
            act_on(policy, outputs, seeds=seeds_of(300, seed))[ActResult.ACTIONS][:, 0]
            for seed in range(300)
        ],
        np.float64,
    )
    assert farthest(table.ravel(), 0, 1) < 2
    pairs = [(table[1:], table[:-1]), (table[:, 1:], table[:, :-1]), (table, table.T)]
    off_diagonal = ~np.eye(300, dtype=bool)
    for left, right in pairs[:2]:
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 4 / 300
    left, right = pairs[2]
    assert abs(np.corrcoef(left[off_diagonal], right[off_diagonal])[0, 1]) < 6 / 300


@pytest.mark.parametrize("name", POLICIES)
def test_judged_actions_have_the_scores_of_their_draw(name: str) -> None:
    policy, outputs = policy_of(name), outputs_of(name, 64, 3)
    drawn = act_on(policy, outputs)
    judged = act_on(
        policy, outputs, seeds=seeds_of(64, seed=99), actions=mx.array(drawn[ActResult.ACTIONS])
    )
    # tanh leaves few bits of a number beyond 2; SB3 reads such actions back no better.
    is_exact = np.ones((64, 3), bool)
    if name == "squashed_gaussian":
        is_exact = np.abs(drawn[ActResult.ACTIONS]).max(axis=-1) < 0.9
    for key, array in drawn.items():
        np.testing.assert_allclose(judged[key][is_exact], array[is_exact], rtol=1e-5, atol=1e-5)


def test_rows_are_judged_likeliest_or_drawn_in_one_batch() -> None:
    policy, outputs = policy_of("gaussian"), outputs_of("gaussian", 9)
    is_third = [mx.array(np.arange(9) % 3 == place) for place in range(3)]
    given_actions = mx.full((9, 3), 0.25)
    mixed = act_on(
        policy, outputs, is_deterministic=is_third[0], actions=given_actions, is_judged=is_third[1]
    )
    parts = [
        act_on(policy, outputs, greedy=True),
        act_on(policy, outputs, actions=given_actions),
        act_on(policy, outputs),
    ]
    for key, array in mixed.items():
        for place, part in enumerate(parts):
            np.testing.assert_array_equal(array[place::3], part[key][place::3])


def test_actions_for_an_environment_are_clipped_or_scaled() -> None:
    outputs = {
        "out": mx.array([[4.0, -4.0, 0.0]]),
        "spread": mx.zeros((1, 3)),
        "value": mx.zeros((1, 1)),
    }
    clipped = act_on(policy_of("gaussian"), outputs, greedy=True)
    assert clipped[ActResult.ACTIONS].tolist() == [[4.0, -4.0, 0.0]]
    assert clipped[ActResult.ACTIONS_FOR_ENV].tolist() == [[0.5, -1.0, 0.0]]
    squashed = act_on(policy_of("squashed_gaussian"), outputs, greedy=True)
    expected = [0.5 * math.tanh(4), -math.tanh(4), 0.5]
    np.testing.assert_allclose(squashed[ActResult.ACTIONS_FOR_ENV][0], expected, rtol=1e-6)
    unbounded = PolicySpec(distribution=Distribution.GAUSSIAN, parameters="out", log_std="spread")
    assert act_on(unbounded, outputs, greedy=True)["actions_for_env"].tolist() == [[4, -4, 0]]


def test_choices_of_no_probability_add_no_entropy() -> None:
    logits = mx.array([[0.0, -mx.inf, 0.0, -mx.inf, -mx.inf]])
    results = act_on(policy_of("categorical"), {"out": logits, "value": mx.zeros((1, 1))})
    np.testing.assert_allclose(results[ActResult.ENTROPY], [math.log(2)], rtol=1e-6)
    sure = act_on(policy_of("bernoulli"), {"out": mx.array([[200.0]]), "value": mx.zeros(1)})
    assert sure[ActResult.ENTROPY].tolist() == [0.0]
    single = act_on(policy_of("categorical"), {"out": mx.array([[5.0]]), "value": mx.zeros(1)})
    assert str(single[ActResult.ENTROPY].tolist()) == "[0.0]", "an entropy is -0.0"


def test_the_likeliest_bit_of_even_chances_is_zero() -> None:
    outputs = {"out": mx.array([[0.0, 1e-6, -1e-6]]), "value": mx.zeros((1, 1))}
    assert act_on(policy_of("bernoulli"), outputs, greedy=True)["actions"].tolist() == [[0, 1, 0]]


def test_half_precision_outputs_are_scored_in_float32() -> None:
    outputs = {name: a.astype(mx.bfloat16) for name, a in outputs_of("gaussian", 5).items()}
    results = act_on(policy_of("gaussian"), outputs)
    assert {array.dtype for array in results.values()} == {np.dtype("float32")}
