"""examples/policies against a server: it acts, takes new weights, and says which acted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from examples.policies import train as command
from examples.policies.cartpole import Carts
from examples.policies.networks import Memory, Network, Perceptron
from examples.policies.ppo import Settings, Trainer, train
from examples.policies.rollouts import Player, WrongVersionError, evaluate
from examples.policies.served import ServedPolicy
from mlx_parallm.client import RequestFailedError, SyncRLClient
from mlx_parallm.models.nets.plan import read_net
from tests.server_process import ServerProcess

TASKS = {"demo:cartpole": Perceptron(), "demo:memory": Memory()}
SETTINGS = Settings(carts=8, steps=24, updates=2, epochs=1, minibatches=2)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    process = ServerProcess("--model", *TASKS)
    process.wait_until_ready()
    yield process
    process.stop()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[SyncRLClient]:
    with SyncRLClient(server.url) as client:
        yield client


@pytest.mark.slow
def test_the_policies_of_the_package_balance_over_http(client: SyncRLClient) -> None:
    for name, network in TASKS.items():
        carts = [Carts(32, 10**6, shows_velocities=not network.state_shapes) for _ in range(2)]
        zeros = Trainer(network, SETTINGS, 0).zeros(32)
        policy = ServedPolicy(client, name)
        assert evaluate(policy, carts[0], zeros) >= 475
        if network.state_shapes:
            assert evaluate(policy, carts[1], zeros, keeps_states=False) <= 200


@pytest.mark.parametrize("name", TASKS)
def test_new_weights_act_after_each_update(client: SyncRLClient, name: str) -> None:
    network = TASKS[name]
    trainer = Trainer(network, SETTINGS, 1)
    carts = new_carts(network)
    policy = ServedPolicy(client, name)
    updates = list(train(policy, trainer, carts, SETTINGS, 1))
    assert carts.returns
    assert max(update.mismatch for update in updates) < 1e-5
    zeros = trainer.zeros(8)
    answer = policy.act(carts.observations, zeros, np.ones(8, bool))
    assert answer.version == "ppo-2"
    again = policy.act(carts.observations, zeros, np.ones(8, bool))
    assert (answer.log_probs == again.log_probs).all()


def new_carts(network: Network) -> Carts:
    return Carts(8, 1, shows_velocities=not network.state_shapes)


def test_seeds_decide_the_actions(client: SyncRLClient) -> None:
    carts = Carts(64, 0)
    trainer = Trainer(TASKS["demo:cartpole"], SETTINGS, 0)
    policy = ServedPolicy(client, "demo:cartpole")
    policy.upload(trainer.arrays(), "even")
    starts = np.ones(64, bool)
    first, same, other = (
        policy.act(carts.observations, {}, starts, seed=seed).actions for seed in (7, 7, 8)
    )
    assert (first == same).all()
    assert (first != other).any()
    assert 0 < first.sum() < 64


def test_another_trainer_in_between_is_noticed(client: SyncRLClient) -> None:
    trainer = Trainer(TASKS["demo:cartpole"], SETTINGS, 0)
    own, other = (ServedPolicy(client, "demo:cartpole") for _ in range(2))
    own.upload(trainer.arrays(), "own")
    other.upload(trainer.arrays(), "other")
    player = Player(own, new_carts(TASKS["demo:cartpole"]), {}, 0)
    with pytest.raises(WrongVersionError, match="'other' acted"):
        player.play(1, "own", 0.9)
    with pytest.raises(RequestFailedError, match="they are at 'other'"):
        own.upload(trainer.arrays(), "own-2")


@pytest.mark.parametrize(
    ("name", "value"),
    [("value.bias", np.zeros(3)), ("value.bias", np.array([np.nan])), ("more.bias", np.zeros(1))],
    ids=["shape", "nan", "unknown"],
)
def test_a_refused_upload_leaves_the_old_weights(
    client: SyncRLClient, name: str, value: np.ndarray
) -> None:
    trainer = Trainer(TASKS["demo:cartpole"], SETTINGS, 0)
    policy = ServedPolicy(client, "demo:cartpole")
    policy.upload(trainer.arrays(), "good")
    observations = Carts(4, 0).observations
    before = policy.act(observations, {}, np.ones(4, bool))
    with pytest.raises(RequestFailedError, match=r"bias|finite"):
        policy.upload({**trainer.arrays(), name: value.astype(np.float32)}, "bad")
    after = policy.act(observations, {}, np.ones(4, bool))
    assert after.version == "good"
    assert (before.log_probs == after.log_probs).all()


@pytest.mark.slow
def test_the_command_trains_reports_and_saves(
    server: ServerProcess,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(command.SETTINGS, "cartpole", SETTINGS)
    options = ["--url", server.url, "--updates", "1", "--save", str(tmp_path / "trained")]
    command.main(command.parse_arguments(options))
    printed = capsys.readouterr().out
    assert "update 1: 192 steps" in printed
    assert "likeliest actions:" in printed
    assert read_net(tmp_path / "trained").signature.policy is not None


@pytest.mark.parametrize("task", ["cartpole", "memory"])
def test_a_new_folder_needs_no_server(tmp_path: Path, task: str) -> None:
    command.main(command.parse_arguments(["--task", task, "--new", str(tmp_path)]))
    assert read_net(tmp_path).signature.has_time == (task == "memory")
