"""A writer of what policies of Stable-Baselines3 compute: tests/golden/policies.

Run it by hand, in an environment of its own that has torch:

    python3 -m venv /tmp/golden
    /tmp/golden/bin/pip install torch==2.13.0 stable-baselines3==2.9.* sb3-contrib==2.9.* \
        gymnasium==1.4.0 safetensors numpy
    /tmp/golden/bin/python -m scripts.golden_policies [--only part-of-a-name]

Each folder is what ``examples/policies/from_sb3.py`` writes of a tiny model whose weights are
``golden_weight`` of torch's names. Weights of convolutions are left out, for tests can make them.
``values.safetensors`` has, in float32 or as SB3 has them:

- ``inputs.NAME``: observations, before anything that SB3 or ``VecNormalize`` does to them;
- ``states.NAME``, ``next_states.NAME``, ``episode_start``: those of recurrent policies;
- ``mask``: the choices that are allowed;
- ``actions``, with ``log_probs``, ``entropy`` and ``values``: actions that SB3 drew and judged;
- ``likeliest``, ``likeliest_log_probs``: the deterministic actions;
- ``for_env``, ``likeliest_for_env``: actions as an environment gets them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium  # pyright: ignore[reportMissingImports]
import numpy as np
import sb3_contrib  # pyright: ignore[reportMissingImports]
import stable_baselines3 as sb3  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]
from gymnasium.spaces import (  # pyright: ignore[reportMissingImports]
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
)
from safetensors.numpy import save_file
from sb3_contrib.common.recurrent.type_aliases import (  # pyright: ignore[reportMissingImports]
    RNNStates,
)
from stable_baselines3.common.vec_env import (  # pyright: ignore[reportMissingImports]
    DummyVecEnv,
    VecNormalize,
)

from examples.policies.from_sb3 import convert
from tests.golden_weights import golden_weight

FOLDER = Path(__file__).parent.parent / "tests" / "golden" / "policies"
NUM_ROWS = 7
NUM_TIMES = 6
VECTOR = Box(-5, 5, (5,), np.float32)
IMAGE = Box(0, 255, (1, 36, 36), np.uint8)
JOINT = Dict(
    {
        "where": Box(-1, 1, (2, 2), np.float32),
        "which": Discrete(3),
        "parts": MultiDiscrete([2, 4]),
        "flags": MultiBinary(3),
    }
)
REACH = Box(np.array([-1, -0.5, -2]), np.array([1, 0.5, 3]), dtype=np.float32)
SMALL = {"net_arch": [8, 6]}


@dataclass(frozen=True, slots=True)
class Case:
    """A model: its algorithm, policy, spaces and further settings."""

    algorithm: Any
    policy: str
    observations: Any
    actions: Any
    policy_kwargs: dict[str, Any] = field(default_factory=lambda: SMALL)
    is_normalized: bool = False


CASES = {
    "ppo_mlp": Case(sb3.PPO, "MlpPolicy", VECTOR, Discrete(4)),
    "ppo_linear": Case(sb3.PPO, "MlpPolicy", Discrete(5), REACH, {"net_arch": []}),
    "a2c_normalized": Case(
        sb3.A2C,
        "MlpPolicy",
        VECTOR,
        REACH,
        {"net_arch": {"pi": [8], "vf": [6, 5]}, "activation_fn": torch.nn.ELU},
        is_normalized=True,
    ),
    "ppo_bits": Case(sb3.PPO, "MlpPolicy", MultiBinary(4), MultiBinary(3)),
    "ppo_cnn": Case(
        sb3.PPO, "CnnPolicy", IMAGE, Discrete(3), {"features_extractor_kwargs": {"features_dim": 8}}
    ),
    "ppo_dict": Case(
        sb3.PPO,
        "MultiInputPolicy",
        JOINT,
        MultiDiscrete([3, 2]),
        {**SMALL, "share_features_extractor": False},
    ),
    "ppo_dict_normalized": Case(
        sb3.PPO,
        "MultiInputPolicy",
        Dict({"near": VECTOR, "far": Box(-9, 9, (2, 3), np.float32)}),
        Discrete(3),
        is_normalized=True,
    ),
    "sac": Case(sb3.SAC, "MlpPolicy", VECTOR, REACH),
    "td3": Case(sb3.TD3, "MlpPolicy", VECTOR, REACH),
    "recurrent": Case(
        sb3_contrib.RecurrentPPO,
        "MlpLstmPolicy",
        VECTOR,
        Discrete(4),
        {**SMALL, "lstm_hidden_size": 6, "n_lstm_layers": 2},
    ),
    "recurrent_shared": Case(
        sb3_contrib.RecurrentPPO,
        "MlpLstmPolicy",
        VECTOR,
        REACH,
        {**SMALL, "lstm_hidden_size": 5, "shared_lstm": True, "enable_critic_lstm": False},
        is_normalized=True,
    ),
    "recurrent_dict": Case(
        sb3_contrib.RecurrentPPO,
        "MultiInputLstmPolicy",
        Dict({"near": VECTOR, "which": Discrete(3)}),
        MultiDiscrete([2, 3]),
        {**SMALL, "lstm_hidden_size": 5, "enable_critic_lstm": False},
    ),
    "maskable": Case(sb3_contrib.MaskablePPO, "MlpPolicy", VECTOR, Discrete(5)),
    "maskable_joint": Case(sb3_contrib.MaskablePPO, "MlpPolicy", VECTOR, MultiDiscrete([3, 2])),
    "maskable_bits": Case(sb3_contrib.MaskablePPO, "MlpPolicy", VECTOR, MultiBinary(3)),
}


class Still(gymnasium.Env[Any, Any]):
    """An environment in which nothing happens."""

    def __init__(self, case: Case) -> None:
        """Take the spaces of a case."""
        self.observation_space, self.action_space = case.observations, case.actions

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        """Return an observation."""
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Return an observation."""
        del action
        return self.observation_space.sample(), 0.0, False, False, {}


def main() -> None:
    """Write a folder for each case, or for those whose names contain ``--only``."""
    parser = argparse.ArgumentParser(description="Golden values of policies.")
    parser.add_argument("--only", default="", help="a part of the names of the cases")
    only = parser.parse_args().only
    for name, case in CASES.items():
        if only in name:
            write(name, case)


@torch.no_grad()
def write(name: str, case: Case) -> None:
    """Write the folder of a case."""
    model = model_of(case)
    net = convert(model)
    net.save(FOLDER / name)
    if case.observations is IMAGE:
        (FOLDER / name / "model.safetensors").unlink()
        for weight, array in net.weights.items():
            np.testing.assert_array_equal(array, golden_weight(weight, array.shape))
    observations, seen = observations_of(model, case)
    evaluate = recurrent_values if hasattr(model.policy, "lstm_actor") else values_of
    values = evaluate(model, seen) | {f"inputs.{key}": each for key, each in observations.items()}
    arrays = {
        key: np.ascontiguousarray(array, np.float32 if array.dtype == np.float64 else None)
        for key, array in values.items()
    }
    save_file(arrays, FOLDER / name / "values.safetensors")
    print(f"{name}: {', '.join(f'{key} {array.shape}' for key, array in arrays.items())}")


def model_of(case: Case) -> Any:
    """Return the model of a case, with golden weights and statistics."""
    env: Any = DummyVecEnv([lambda: Still(case)])
    random = np.random.RandomState(3)
    if case.is_normalized:
        env = VecNormalize(env, clip_obs=1.5)
        statistics = env.obs_rms if isinstance(env.obs_rms, dict) else {"": env.obs_rms}
        for each in statistics.values():
            each.mean = random.standard_normal(each.mean.shape)
            each.var = random.uniform(0.5, 4, each.var.shape)
    model = case.algorithm(case.policy, env, policy_kwargs=dict(case.policy_kwargs), device="cpu")
    for name, parameter in model.policy.named_parameters():
        weight = golden_weight(name, parameter.shape)
        # Where tanh leaves few bits of a number, or deviations are tiny, float32 compares badly.
        is_squashed = name.startswith(("actor.mu", "actor.log_std")) and case.algorithm is sb3.SAC
        parameter.data = torch.from_numpy(weight * np.float32(0.25 if is_squashed else 1))
    if case.algorithm is sb3.SAC:
        # This deviation is beyond the greatest that SAC allows.
        model.policy.actor.log_std.bias.data[0] = 9.0
    model.policy.set_training_mode(False)
    return model


def observations_of(model: Any, case: Case) -> tuple[dict[str, np.ndarray], Any]:
    """Return observations by the names of inputs, and as the policy gets them."""
    case.observations.seed(5)
    is_recurrent = hasattr(model.policy, "lstm_actor")
    shape = (NUM_ROWS, NUM_TIMES) if is_recurrent else (NUM_ROWS,)
    samples = [case.observations.sample() for _ in range(int(np.prod(shape)))]
    normalize: Callable[[Any], Any] = lambda each: each  # noqa: E731
    if case.is_normalized:
        normalize = model.get_vec_normalize_env().normalize_obs
    if isinstance(case.observations, Dict):
        stacked = {key: np.stack([each[key] for each in samples]) for key in samples[0]}
        seen = normalize(stacked)
    else:
        stacked = {"obs": np.stack(samples)}
        seen = normalize(stacked["obs"])
    return {key: each.reshape(*shape, *each.shape[1:]) for key, each in stacked.items()}, seen


def values_of(model: Any, seen: Any) -> dict[str, np.ndarray]:
    """Return what a policy without memory computes."""
    policy = model.policy
    tensors, _ = policy.obs_to_tensor(seen)
    masks = masks_of(policy)
    extra = {} if masks is None else {"action_masks": masks}
    torch.manual_seed(1)
    actions = policy._predict(tensors, deterministic=False, **extra)
    likeliest = policy._predict(tensors, deterministic=True, **extra)
    results = {} if masks is None else {"mask": masks}
    results |= scores(policy, tensors, actions, extra)
    best = scores(policy, tensors, likeliest, extra, are_likeliest=True)
    if "log_probs" in best:
        results["likeliest_log_probs"] = best["log_probs"]
    for_env, _ = policy.predict(seen, deterministic=True, **extra)
    return results | {
        "actions": actions.numpy(),
        "likeliest": likeliest.numpy(),
        "for_env": for_environment(policy, actions.numpy()),
        "likeliest_for_env": for_env,
    }


def masks_of(policy: Any) -> np.ndarray | None:
    """Return masks for a policy of MaskablePPO, which allow a choice of each part."""
    if not policy.__class__.__name__.startswith("Maskable"):
        return None
    space = policy.action_space
    sizes = [space.n] if isinstance(space, Discrete) else getattr(space, "nvec", [2] * 3)
    random = np.random.RandomState(4)
    masks = random.uniform(size=(NUM_ROWS, int(sum(sizes)))) < 0.5
    masks[:, np.cumsum([0, *sizes[:-1]])] |= random.uniform(size=(NUM_ROWS, len(sizes))) < 0.5
    for row in masks:
        for part in np.split(row, np.cumsum(sizes)[:-1]):
            part[random.randint(len(part))] |= not part.any()
    return masks


def scores(
    policy: Any, tensors: Any, actions: Any, extra: dict[str, Any], *, are_likeliest: bool = False
) -> dict[str, np.ndarray]:
    """Return log-probabilities, entropies and values of actions, as far as SB3 has them."""
    if hasattr(policy, "evaluate_actions"):
        values, log_probs, entropy = policy.evaluate_actions(tensors, actions, **extra)
        return {
            "values": values[:, 0].numpy(),
            "log_probs": log_probs.numpy(),
            "entropy": entropy.numpy(),
        }
    if not hasattr(policy.actor, "latent_pi"):
        return {}
    mean, log_std, _ = policy.actor.get_action_dist_params(tensors)
    distribution = policy.actor.action_dist.proba_distribution(mean, log_std)
    of_tanh = mean if are_likeliest else None
    return {"log_probs": distribution.log_prob(actions, of_tanh).numpy()}


def for_environment(policy: Any, actions: np.ndarray) -> np.ndarray:
    """Return actions as SB3 gives them to an environment."""
    if not isinstance(policy.action_space, Box):
        return actions
    if policy.squash_output:
        return policy.unscale_action(actions)
    return np.clip(actions, policy.action_space.low, policy.action_space.high)


def recurrent_values(model: Any, seen: Any) -> dict[str, np.ndarray]:
    """Return what a recurrent policy computes, time by time and all at once."""
    policy = model.policy
    random = np.random.RandomState(6)
    starts = random.uniform(size=(NUM_ROWS, NUM_TIMES)) < 0.3
    layers, _, size = policy.lstm_hidden_state_shape
    names = ["lstm_actor"] + ["lstm_critic"] * (policy.lstm_critic is not None)
    begin = {
        f"{name}.{part}": random.standard_normal((layers, NUM_ROWS, size)).astype(np.float32)
        for name in names
        for part in "hc"
    }
    of_actor, of_critic = (
        tuple(torch.from_numpy(begin[f"{name}.{part}"]) for part in "hc")
        for name in (names[0], names[-1])
    )
    tensors, _ = policy.obs_to_tensor(seen)
    flags = torch.from_numpy(starts.astype(np.float32))
    torch.manual_seed(1)
    states, steps = RNNStates(of_actor, of_critic), []
    for time in range(NUM_TIMES):
        now = at_time(tensors, time)
        best, _, log_probs, after = policy(now, states, flags[:, time], deterministic=True)
        drawn = policy(now, states, flags[:, time], deterministic=False)[0]
        steps.append((best, log_probs, drawn))
        states = after
    likeliest, best_log_probs, actions = (
        torch.stack(each, dim=1) for each in zip(*steps, strict=True)
    )
    values, log_probs, entropy = policy.evaluate_actions(
        tensors, actions.flatten(0, 1), RNNStates(of_actor, of_critic), flags.flatten()
    )
    ends = dict(zip(begin, [*states.pi, *states.vf], strict=False))
    shape = (NUM_ROWS, NUM_TIMES)
    return {
        **{f"states.{name}": state.swapaxes(0, 1) for name, state in begin.items()},
        **{f"next_states.{name}": state.numpy().swapaxes(0, 1) for name, state in ends.items()},
        "episode_start": starts,
        "actions": actions.numpy(),
        "log_probs": log_probs.numpy().reshape(shape),
        "entropy": entropy.numpy().reshape(shape),
        "values": values.numpy().reshape(shape),
        "likeliest": likeliest.numpy(),
        "likeliest_log_probs": best_log_probs.numpy(),
        "for_env": for_environment(policy, actions.numpy()),
        "likeliest_for_env": for_environment(policy, likeliest.numpy()),
    }


def at_time(tensors: Any, time: int) -> Any:
    """Return the observations of all rows at a time."""
    if isinstance(tensors, dict):
        return {key: at_time(each, time) for key, each in tensors.items()}
    return tensors.reshape(NUM_ROWS, NUM_TIMES, *tensors.shape[1:])[:, time]


if __name__ == "__main__":
    main()
