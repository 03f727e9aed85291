"""The parts of examples/policies that train, without a server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from examples.policies.cartpole import MAX_STEPS, Carts, advance
from examples.policies.networks import Memory, Network, Perceptron, save
from examples.policies.ppo import Settings, Trainer, train
from examples.policies.rollouts import Acts, Arrays, Player, Rollout, WrongVersionError, evaluate
from mlx_parallm.models.nets.plan import parse_net, read_net
from tests.local_policy import LocalPolicy

NETWORKS = (Perceptron(), Memory())


def towards_the_fall(observations: np.ndarray) -> np.ndarray:
    """Return the actions that keep poles up."""
    lean = observations[:, 2] + 0.5 * observations[:, 3] + 0.02 * observations[:, 0]
    return (lean > 0).astype(np.int64)


class Balancer:
    """Keeps poles up; its state, and its value of a cart, is the number of observations."""

    def __init__(self) -> None:
        self.version = "a"

    def upload(self, weights: Arrays, version: str) -> None:
        self.version = version

    def act(
        self,
        observations: np.ndarray,
        states: Arrays,
        starts: np.ndarray,
        *,
        seed: int | None = None,
    ) -> Acts:
        steps = np.where(starts, 0, states["age"]) + 1
        return Acts(
            actions=towards_the_fall(observations),
            log_probs=np.zeros(len(starts), np.float32),
            values=steps.astype(np.float32),
            states={"age": steps},
            version=self.version,
        )


def balance(num_carts: int, seed: int = 0) -> Player:
    zeros = {"age": np.zeros(num_carts, np.int64)}
    return Player(Balancer(), Carts(num_carts, seed), zeros, seed)


def test_carts_move_as_those_of_gymnasium() -> None:
    # CartPole-v1 of gymnasium 1.4.0.
    state = np.array([[0.1, -0.2, 0.05, 0.3]])
    for action in (1, 0, 0, 1, 1, 0, 0, 0):
        state = advance(state, np.array([action]))
    expected = [0.0675192, -0.5979489, 0.1087009, 1.060169]
    assert state[0] == pytest.approx(expected, abs=1e-6)


def test_a_fall_and_the_longest_episode_end_differently() -> None:
    falling, balanced = Carts(3, 0), Carts(3, 0)
    fallen = falling.step(np.ones(3, np.int64))
    while not fallen.has_ended.any():
        fallen = falling.step(np.ones(3, np.int64))
    assert fallen.has_fallen.any()
    assert not fallen.is_cut.any()
    ended = fallen.has_fallen
    assert (np.abs(fallen.last_observations[ended, 2]) > 0.2).all()
    assert (np.abs(fallen.observations[ended]) <= 0.05).all()
    assert (fallen.observations[~ended] == fallen.last_observations[~ended]).all()
    for _ in range(MAX_STEPS - 1):
        assert not balanced.step(towards_the_fall(balanced.observations)).has_ended.any()
    cut = balanced.step(towards_the_fall(balanced.observations))
    assert cut.is_cut.all()
    assert not cut.has_fallen.any()
    assert balanced.returns == [MAX_STEPS] * 3


def test_a_fall_at_the_longest_age_is_a_fall() -> None:
    carts = Carts(1, 0)
    carts._ages[:] = MAX_STEPS - 1
    carts._state[:] = [0, 0, 0.2095, 5]
    outcome = carts.step(np.array([0]))
    assert outcome.has_fallen.all()
    assert not outcome.is_cut.any()


def test_carts_without_velocities_show_places() -> None:
    seen, places = Carts(4, 1), Carts(4, 1, shows_velocities=False)
    assert (seen.observations[:, [0, 2]] == places.observations).all()
    assert places.step(np.zeros(4, np.int64)).last_observations.shape == (4, 2)


def test_what_is_cut_is_worth_what_the_critic_expects_of_its_own_episode() -> None:
    player = balance(2)
    rollout = player.play(MAX_STEPS, "a", discount=0.5)
    assert rollout.ends.nonzero()[1].tolist() == [MAX_STEPS - 1] * 2
    # The state goes on for the last observation, and begins anew for the one after that.
    assert (rollout.rewards[:, :-1] == 0.5).all()
    assert (rollout.rewards[:, -1] == 0.5 + 0.5 * (MAX_STEPS + 1)).all()
    assert (rollout.values[:, -1] == 1).all()
    later = player.play(2, "a", discount=0.5)
    assert later.starts.tolist() == [[True, False]] * 2
    assert later.values[:, :2].tolist() == [[1, 2]] * 2


def test_rollouts_go_on_with_the_states_of_the_last_one() -> None:
    player = balance(3)
    player.play(5, "a", discount=0.9)
    rollout = player.play(2, "a", discount=0.9)
    assert rollout.states["age"].tolist() == [5] * 3
    assert rollout.values.tolist() == [[6, 7, 8]] * 3
    assert not rollout.starts.any()


def test_an_answer_of_another_version_stops_the_play() -> None:
    with pytest.raises(WrongVersionError, match=r"'a' acted; 'b' was uploaded last"):
        balance(1).play(1, "b", discount=0.9)


def rollout_of(rewards: list[float], values: list[float], ends: list[bool]) -> Rollout:
    row = np.array([rewards], np.float32)
    return Rollout(
        observations=row,
        actions=row,
        log_probs=row,
        values=np.array([values], np.float32),
        rewards=row,
        starts=np.zeros_like(row, bool),
        ends=np.array([ends]),
        states={},
    )


def test_advantages_end_with_episodes() -> None:
    rollout = rollout_of([1, 1, 1], [2, 3, 4, 5], [False, True, False])
    last = 1 + 0.5 * 5 - 4
    second = 1 - 3
    expected = [1 + 0.5 * 3 - 2 + 0.5 * 0.25 * second, second, last]
    assert rollout.advantages(0.5, 0.25)[0] == pytest.approx(expected)


def test_with_a_trace_of_1_advantages_are_returns_above_values() -> None:
    rewards, values = [1.0, 2.0, 3.0, 4.0], [0.5, -1.0, 2.0, 0.0, 7.0]
    rollout = rollout_of(rewards, values, [False] * 4)
    expected = [
        sum(0.9**later * reward for later, reward in enumerate(rewards[place:]))
        + 0.9 ** (4 - place) * values[4]
        - values[place]
        for place in range(4)
    ]
    assert rollout.advantages(0.9, 1.0)[0] == pytest.approx(expected)


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: type(network).__name__)
def test_a_folder_is_a_net_with_the_states_of_the_trainer(network: Network, tmp_path: Path) -> None:
    weights = network.new_weights(0)
    save(network, weights, tmp_path)
    plan = read_net(tmp_path)
    forms = {name: (weight.shape, "float32") for name, weight in weights.items()}
    assert plan.weight_fault(forms) is None
    assert {spec.name: spec.shape[1:] for spec in plan.signature.states} == network.state_shapes
    assert set(mx.load(str(tmp_path / "model.safetensors"))) == set(weights)


def test_an_episode_in_the_middle_begins_without_memory() -> None:
    network = Memory()
    weights = network.new_weights(3)
    observations = mx.random.normal((2, 7, 2), key=mx.random.key(0))
    starts = mx.array([[False] * 4 + [True] + [False] * 2] * 2)
    states = {name: mx.ones((2, 1, 64)) for name in network.state_shapes}
    zeros = {name: mx.zeros((2, 1, 64)) for name in network.state_shapes}
    logits, values = network.forward(weights, observations, starts, states)
    never = mx.zeros((2, 3), mx.bool_)
    later = network.forward(weights, observations[:, 4:], never, zeros)
    assert np.allclose(logits[:, 4:], later[0], atol=1e-7)
    assert np.allclose(values[:, 4:], later[1], atol=1e-7)
    # A state that an ended episode left does not matter, if the first time begins another.
    begins = mx.array([[True, False, False]] * 2)
    again = network.forward(weights, observations[:, 4:], begins, states)
    assert np.allclose(again[0], later[0], atol=1e-7)
    earlier = network.forward(weights, observations[:, :4], starts[:, :4], zeros)
    assert not np.allclose(values[:, :4], earlier[1], atol=1e-3)


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: type(network).__name__)
def test_an_update_makes_better_actions_likelier(network: Network) -> None:
    settings = Settings(carts=4, steps=8, minibatches=2, epochs=3)
    trainer = Trainer(network, settings, seed=0)
    policy = LocalPolicy(parse_net(network.config()))
    policy.upload(trainer.arrays(), "a")
    carts = Carts(4, 0, shows_velocities=not network.state_shapes)
    rollout = Player(policy, carts, trainer.zeros(4), 0).play(8, "a", 0.9)
    # The right is always better here, whatever the game says.
    rewards = rollout.actions.astype(np.float32)
    better = replace(rollout, rewards=rewards)
    before = np.exp(_log_probs_of_right(network, trainer, rollout)).mean()
    trainer.update(better, 1.0)
    assert np.exp(_log_probs_of_right(network, trainer, rollout)).mean() > before + 0.02


def _log_probs_of_right(network: Network, trainer: Trainer, rollout: Rollout) -> np.ndarray:
    states = {name: mx.array(state) for name, state in rollout.states.items()}
    logits, _ = network.forward(
        trainer.weights, mx.array(rollout.observations), mx.array(rollout.starts), states
    )
    return np.array((logits - mx.logsumexp(logits, axis=-1, keepdims=True))[..., 1])


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: type(network).__name__)
def test_each_update_is_uploaded_and_then_acts(network: Network) -> None:
    settings = Settings(carts=8, steps=20, updates=3, epochs=1, minibatches=2)
    policy = LocalPolicy(parse_net(network.config()))
    carts = Carts(8, 0, shows_velocities=not network.state_shapes)
    updates = list(train(policy, Trainer(network, settings, 0), carts, settings, 0))
    assert policy.versions == ["ppo-0", "ppo-1", "ppo-2", "ppo-3"]
    assert [(update.number, update.steps) for update in updates] == [(1, 160), (2, 320), (3, 480)]
    # The server's layers and the trainer's forward are one function, states and resets included.
    assert carts.returns
    assert max(update.mismatch for update in updates) < 1e-5


def test_an_evaluation_plays_one_episode_of_each_cart() -> None:
    zeros = {"age": np.zeros(4, np.int64)}
    assert evaluate(Balancer(), Carts(4, 0), zeros) == MAX_STEPS


@pytest.mark.slow
def test_the_policy_learns_to_balance() -> None:
    settings = Settings(updates=60)
    network = Perceptron()
    policy = LocalPolicy(parse_net(network.config()))
    carts = Carts(settings.carts, 0)
    *_, last = train(policy, Trainer(network, settings, 0), carts, settings, 0)
    assert last.mean_return > 200
