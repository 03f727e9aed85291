"""Folders of policies with what Stable-Baselines3 computes; see scripts/golden_policies.py."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from safetensors.numpy import load_file

from mlx_parallm.models.nets.plan import NetPlan, read_net
from mlx_parallm.types.nets import PolicySpec
from mlx_parallm.worker.nets.distributions import act
from mlx_parallm.worker.nets.layers import forward
from tests.golden_weights import golden_weight

FOLDER = Path(__file__).parent / "golden" / "policies"
NAMES = sorted(path.name for path in FOLDER.iterdir())

Arrays = dict[str, np.ndarray]


class GoldenPolicy:
    """A policy and its golden values.

    Attributes:
        path: of the folder.
        values: by the names that scripts/golden_policies.py lists.
    """

    def __init__(self, name: str) -> None:
        self.path = FOLDER / name
        self.values: Arrays = load_file(self.path / "values.safetensors")

    @cached_property
    def plan(self) -> NetPlan:
        """The layers."""
        return read_net(self.path)

    @property
    def policy(self) -> PolicySpec:
        """The roles of outputs."""
        policy = self.plan.signature.policy
        assert policy is not None
        return policy

    @cached_property
    def weights(self) -> dict[str, mx.array]:
        """The weights; those of convolutions are in no file."""
        file = self.path / "model.safetensors"
        if file.exists():
            return {name: mx.array(array) for name, array in load_file(file).items()}
        shapes = {name: parameter.shape for name, parameter in self.plan.parameters.items()}
        return {name: mx.array(golden_weight(name, shape)) for name, shape in shapes.items()}

    @property
    def inputs(self) -> Arrays:
        """The observations in the dtypes of the signature."""
        named = self.named("inputs")
        return {
            spec.name: named[spec.name].astype(spec.dtype) for spec in self.plan.signature.inputs
        }

    def named(self, prefix: str) -> Arrays:
        """Return the values whose names begin with a prefix and a dot, by the rest."""
        parts = {name: name.partition(".") for name in self.values}
        return {
            rest: self.values[name] for name, (first, _, rest) in parts.items() if first == prefix
        }

    def forward(
        self, inputs: Arrays, states: Arrays, starts: np.ndarray | None
    ) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
        """Return outputs and next states."""
        return forward(
            self.plan,
            self.weights,
            {name: mx.array(array) for name, array in inputs.items()},
            {name: mx.array(array) for name, array in states.items()},
            None if starts is None else mx.array(starts),
        )

    def act(self, *, greedy: bool = False, **choice: Any) -> tuple[Arrays, Arrays]:
        """Return an act's results for all observations, and the next states."""
        starts = self.values.get("episode_start")
        outputs, states = self.forward(self.inputs, self.named("states"), starts)
        num_rows = len(self.values["actions"])
        rows = np.arange(num_rows)
        mask = self.values.get("mask")
        results = act(
            self.policy,
            outputs,
            seeds=mx.array(np.stack([rows, rows], axis=1).astype(np.uint32)),
            is_deterministic=mx.full(num_rows, greedy),
            action_mask=None if mask is None else mx.array(mask),
            **choice,
        )
        return to_numpy(results), to_numpy(states)


def to_numpy(arrays: dict[str, mx.array]) -> Arrays:
    """Return arrays as NumPy's."""
    return {name: np.array(array) for name, array in arrays.items()}
