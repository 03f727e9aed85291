"""Write the policy of a Stable-Baselines3 model as a folder that the server loads.

Run it where the model was trained, since reading its archive needs torch and its classes:

    python -m examples.policies.from_sb3 PPO model.zip folder --normalize vecnormalize.pkl

It knows the policies of PPO, A2C, SAC, TD3 and DDPG, and of sb3-contrib's RecurrentPPO,
MaskablePPO, TRPO and TQC, with SB3's extractors of features and the statistics of
``VecNormalize``. Images have their channels first, as the model sees them, and stacks of frames
are stacked by the client.
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import sb3_contrib  # pyright: ignore[reportMissingImports]
import stable_baselines3  # pyright: ignore[reportMissingImports]
from gymnasium import spaces  # pyright: ignore[reportMissingImports]
from stable_baselines3.common import torch_layers  # pyright: ignore[reportMissingImports]
from stable_baselines3.common.preprocessing import (  # pyright: ignore[reportMissingImports]
    is_image_space,
)

from examples.policies.net_writer import NetWriter, UnknownPartError

ALGORITHMS = ("PPO", "A2C", "SAC", "TD3", "DDPG", "RecurrentPPO", "MaskablePPO", "TRPO", "TQC")
#: ``LOG_STD_BOUNDS``: SAC and TQC keep the logarithm of a deviation between them.
LOG_STD_BOUNDS = (-20.0, 2.0)
#: ``OBSERVATION``: the name of observations that are no dictionaries.
OBSERVATION = "obs"


def main() -> None:
    """Convert the archive that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("algorithm", choices=ALGORITHMS)
    parser.add_argument("archive", type=Path, help="what model.save() wrote")
    parser.add_argument("folder", type=Path, help="where to write the net")
    parser.add_argument("--normalize", type=Path, help="what VecNormalize.save() wrote")
    options = parser.parse_args()
    library = stable_baselines3 if hasattr(stable_baselines3, options.algorithm) else sb3_contrib
    model = getattr(library, options.algorithm).load(options.archive, device="cpu")
    normalize = None
    if options.normalize is not None:
        normalize = pickle.loads(options.normalize.read_bytes())
    convert(model, normalize).save(options.folder)


def convert(model: Any, normalize: Any = None) -> NetWriter:
    """Return the net of a model's policy.

    Args:
        model: of SB3 or sb3-contrib.
        normalize: the model's ``VecNormalize``, whose statistics become a layer; None for that of
            the model's environment, if it has one.

    Raises:
        UnknownPartError: the policy has a part that no layer of a net computes.
    """
    policy = model.policy
    if getattr(policy, "use_sde", False) or getattr(model, "use_sde", False):
        raise UnknownPartError("gSDE (use_sde) has no counterpart in nets")
    writer = NetWriter(has_time=hasattr(policy, "lstm_actor"))
    normalize = normalize or model.get_vec_normalize_env()
    observations = _Observations(writer, policy, normalize)
    if hasattr(policy, "mlp_extractor"):
        _add_actor_critic(writer, policy, observations)
    elif hasattr(policy, "actor"):
        _add_actor(writer, policy.actor, observations)
    else:
        raise UnknownPartError(f"{type(policy).__name__} is no policy that this script knows")
    return writer


def _add_actor_critic(writer: NetWriter, policy: Any, observations: _Observations) -> None:
    """Add the policy of PPO, A2C and their like, with its estimate of values."""
    if policy.share_features_extractor:
        acting = valuing = observations.features("features_extractor", policy.features_extractor)
    else:
        acting, valuing = (
            observations.features(f"{name}_features_extractor", extractor)
            for name, extractor in (
                ("pi", policy.pi_features_extractor),
                ("vf", policy.vf_features_extractor),
            )
        )
    if hasattr(policy, "lstm_actor"):
        acting, valuing = _add_memory(writer, policy, acting, valuing)
    extractor = policy.mlp_extractor
    acting = writer.add_module("mlp_extractor.policy_net", extractor.policy_net, acting)
    valuing = writer.add_module("mlp_extractor.value_net", extractor.value_net, valuing)
    parameters = writer.add_module("action_net", policy.action_net, acting)
    value = writer.add_module("value_net", policy.value_net, valuing)
    roles = _roles(writer, policy, parameters)
    roles["value"] = writer.add_output("value", value, 1)
    writer.config["policy"] = roles


def _add_memory(writer: NetWriter, policy: Any, acting: str, valuing: str) -> tuple[str, str]:
    """Add the recurrent layers of actor and critic."""
    after = writer.add_module("lstm_actor", policy.lstm_actor, acting)
    if policy.lstm_critic is not None:
        return after, writer.add_module("lstm_critic", policy.lstm_critic, valuing)
    if policy.shared_lstm:
        return after, after
    return after, writer.add_module("critic", policy.critic, valuing)


def _roles(writer: NetWriter, policy: Any, parameters: str) -> dict[str, Any]:
    """Return the roles of outputs for the distribution of an actor and critic."""
    space = policy.action_space
    num_outputs = policy.action_net.out_features
    if isinstance(space, spaces.Box):
        log_std = writer.add(
            "log_std", "parameter", weights={"value": policy.log_std}, shape=[num_outputs]
        )
        return {
            "distribution": "gaussian",
            "mean": writer.add_output("mean", parameters, num_outputs),
            "log_std": writer.add_output("log_std", log_std, num_outputs, is_constant=True),
            **_bounds(space),
        }
    logits = {"logits": writer.add_output("logits", parameters, num_outputs)}
    if isinstance(space, spaces.Discrete) and space.start == 0:
        return {"distribution": "categorical", **logits}
    if isinstance(space, spaces.MultiDiscrete) and not np.any(space.start):
        sizes = list(map(int, space.nvec))
        return {"distribution": "multi_categorical", **logits, "sizes": sizes}
    if isinstance(space, spaces.MultiBinary):
        # MaskablePPO has two logits for each bit, so that a mask can forbid either.
        if num_outputs == 2 * space.n:
            return {"distribution": "multi_categorical", **logits, "sizes": [2] * int(space.n)}
        return {"distribution": "bernoulli", **logits}
    raise UnknownPartError(f"actions of {space}")


def _bounds(space: Any) -> dict[str, list[float]]:
    """Return the bounds of a space of actions; SB3 has none that are infinite."""
    low, high = (bound.ravel().astype(np.float32).tolist() for bound in (space.low, space.high))
    return {"low": low, "high": high}


def _add_actor(writer: NetWriter, actor: Any, observations: _Observations) -> None:
    """Add the actor of SAC, TQC, TD3 or DDPG; what values their critics know depend on actions."""
    features = observations.features("actor.features_extractor", actor.features_extractor)
    size = int(np.prod(actor.action_space.shape))
    bounds = _bounds(actor.action_space)
    if not hasattr(actor, "latent_pi"):
        mean = writer.add_module("actor.mu", actor.mu, features)
        roles = {"distribution": "deterministic", "mean": writer.add_output("mean", mean, size)}
        writer.config["policy"] = roles | bounds
        return
    latent = writer.add_module("actor.latent_pi", actor.latent_pi, features)
    mean = writer.add_module("actor.mu", actor.mu, latent)
    log_std = writer.add_module("actor.log_std", actor.log_std, latent)
    low, high = LOG_STD_BOUNDS
    log_std = writer.add("actor.log_std.bounded", "clip", log_std, low=low, high=high)
    writer.config["policy"] = {
        "distribution": "squashed_gaussian",
        "mean": writer.add_output("mean", mean, size),
        "log_std": writer.add_output("log_std", log_std, size),
        **bounds,
    }


class _Observations:
    """The observations of a policy as a net's inputs, and layers that prepare them."""

    def __init__(self, writer: NetWriter, policy: Any, normalize: Any) -> None:
        self._writer = writer
        self._scales_images = policy.normalize_images
        self._normalize = normalize
        space = policy.observation_space
        self._spaces: Mapping[str, Any] = (
            space.spaces if isinstance(space, spaces.Dict) else {OBSERVATION: space}
        )
        self._prepared = {name: self._prepare(name, each) for name, each in self._spaces.items()}

    def features(self, name: str, extractor: Any) -> str:
        """Add an extractor of features, and return its last layer."""
        if isinstance(extractor, torch_layers.FlattenExtractor):
            return self._flat(name, OBSERVATION)
        if isinstance(extractor, torch_layers.NatureCNN):
            return self._images(name, extractor, OBSERVATION)
        if isinstance(extractor, torch_layers.CombinedExtractor):
            parts = [
                self._images(f"{name}.extractors.{key}", part, key)
                if isinstance(part, torch_layers.NatureCNN)
                else self._flat(f"{name}.extractors.{key}", key)
                for key, part in extractor.extractors.items()
            ]
            return self._writer.add(name, "concat", *parts) if len(parts) > 1 else parts[0]
        raise UnknownPartError(f"{name} is a {type(extractor).__name__}; write its layers by hand")

    def _images(self, name: str, extractor: Any, key: str) -> str:
        last = self._writer.add_module(f"{name}.cnn", extractor.cnn, self._prepared[key])
        return self._writer.add_module(f"{name}.linear", extractor.linear, last)

    def _flat(self, name: str, key: str) -> str:
        is_flat = len(self._spaces[key].shape) == 1 or isinstance(
            self._spaces[key], spaces.Discrete
        )
        prepared = self._prepared[key]
        return prepared if is_flat else self._writer.add(name, "flatten", prepared)

    def _prepare(self, key: str, space: Any) -> str:
        """Add an input, and layers that do what SB3 does before it extracts features."""
        writer, statistics = self._writer, self._statistics(key)
        if statistics is not None:
            source = writer.add_input(key, "float32", *space.shape)
            return writer.add(
                f"normalize.{key}",
                "normalize",
                source,
                weights={"mean": statistics.mean, "variance": statistics.var},
                shape=list(space.shape),
                epsilon=float(self._normalize.epsilon),
                clip=float(self._normalize.clip_obs),
            )
        if isinstance(space, spaces.Discrete) and space.start == 0:
            source = writer.add_input(key, "int64")
            return writer.add(f"one_hot.{key}", "one_hot", source, num_classes=int(space.n))
        if isinstance(space, spaces.MultiDiscrete) and not np.any(space.start):
            return self._joint_choices(key, space)
        if isinstance(space, spaces.Box) and self._scales_images and is_image_space(space):
            source = writer.add_input(key, space.dtype.name, *space.shape)
            return writer.add(f"scale.{key}", "scale", source, factor=1 / 255)
        if isinstance(space, spaces.Box | spaces.MultiBinary):
            return writer.add_input(key, "float32", *space.shape)
        raise UnknownPartError(f"{key} is an observation of {space}")

    def _joint_choices(self, key: str, space: Any) -> str:
        writer = self._writer
        source = writer.add_input(key, "int64", *space.shape)
        parts: list[str] = []
        for place, size in enumerate(space.nvec):
            name = f"one_hot.{key}.{place}"
            part = writer.add(f"{name}.slice", "slice", source, start=place, stop=place + 1)
            part = writer.add(f"{name}.choice", "one_hot", part, num_classes=int(size))
            parts.append(writer.add(name, "flatten", part))
        return writer.add(f"one_hot.{key}", "concat", *parts)

    def _statistics(self, key: str) -> Any:
        """Return the running statistics of an observation; None if it is not normalised."""
        if self._normalize is None or not self._normalize.norm_obs:
            return None
        statistics = self._normalize.obs_rms
        return statistics.get(key) if isinstance(statistics, dict) else statistics


if __name__ == "__main__":
    main()
