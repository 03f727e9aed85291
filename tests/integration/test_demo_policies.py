"""The policies of the package balance poles."""

from __future__ import annotations

from typing import cast

import mlx.core as mx
import numpy as np
import pytest

from examples.policies.cartpole import Carts
from examples.policies.rollouts import Arrays, evaluate
from mlx_parallm.demo_models.folders import DEMO_FOLDERS
from mlx_parallm.models.nets.plan import read_net
from tests.local_policy import LocalPolicy

NUM_CARTS = 50


def mean_return(name: str, *, shows_velocities: bool = True, keeps_states: bool = True) -> float:
    folder = DEMO_FOLDERS[name]
    plan = read_net(folder)
    policy = LocalPolicy(plan)
    policy.upload(cast("Arrays", mx.load(str(folder / "model.safetensors"))), "a")
    zeros = {
        spec.name: np.zeros((NUM_CARTS, *spec.shape[1:]), np.float32)
        for spec in plan.signature.states
    }
    carts = Carts(NUM_CARTS, 10**6, shows_velocities=shows_velocities)
    return evaluate(policy, carts, zeros, keeps_states=keeps_states)


def test_the_perceptron_balances() -> None:
    assert mean_return("demo:cartpole") >= 475


def test_the_lstm_balances_by_its_memory_alone() -> None:
    assert mean_return("demo:memory", shows_velocities=False) >= 400
    assert mean_return("demo:memory", shows_velocities=False, keeps_states=False) <= 200


@pytest.mark.parametrize("name", ["demo:cartpole", "demo:memory"])
def test_the_folders_are_small(name: str) -> None:
    assert sum(file.stat().st_size for file in DEMO_FOLDERS[name].iterdir()) <= 100_000
