"""Two small actor-critics in MLX, which the server computes from a folder's ``config.json``.

Parameters have torch's names and layouts, as in the folder's ``model.safetensors``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import mlx.core as mx

NUM_ACTIONS = 2
Weights = dict[str, mx.array]
Layer = dict[str, Any]


class Network(Protocol):
    """An actor-critic for rows of several times.

    Attributes:
        state_shapes: the shape of a row's state, by its name.
    """

    state_shapes: Mapping[str, tuple[int, ...]]

    def config(self) -> dict[str, Any]:
        """Return the content of ``config.json``."""
        ...

    def new_weights(self, seed: int) -> Weights:
        """Return weights that know nothing."""
        ...

    def forward(
        self,
        weights: Weights,
        observations: mx.array,
        starts: mx.array,
        states: Mapping[str, mx.array],
    ) -> tuple[mx.array, mx.array]:
        """Return logits ``[rows, time, actions]`` and values ``[rows, time]``.

        Args:
            weights: the parameters by name.
            observations: ``[rows, time, ...]``.
            starts: bool ``[rows, time]``: where an episode begins.
            states: those before the first time, as the server gives them.
        """
        ...


class Perceptron:
    """Two networks of two layers with 64 units, one for the actions and one for the value."""

    num_inputs, num_units = 4, 64
    state_shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})

    def config(self) -> dict[str, Any]:
        """See ``Network``."""
        layers: list[Layer] = []
        for side, output, size in (("pi", "logits", NUM_ACTIONS), ("vf", "value", 1)):
            layers += [
                linear_layer(f"{side}.0", "obs", self.num_inputs, self.num_units),
                {"name": f"{side}.1", "type": "tanh", "inputs": [f"{side}.0"]},
                linear_layer(f"{side}.2", f"{side}.1", self.num_units, self.num_units),
                {"name": f"{side}.3", "type": "tanh", "inputs": [f"{side}.2"]},
                linear_layer(output, f"{side}.3", self.num_units, size),
            ]
        return net_config([-1, self.num_inputs], [-1], layers)

    def new_weights(self, seed: int) -> Weights:
        """See ``Network``."""
        keys = mx.random.split(mx.random.key(seed), 6)
        weights: Weights = {}
        for number, (side, output, size) in enumerate(
            (("pi", "logits", NUM_ACTIONS), ("vf", "value", 1))
        ):
            units = self.num_units
            weights |= new_linear(f"{side}.0", self.num_inputs, units, keys[3 * number])
            weights |= new_linear(f"{side}.2", units, units, keys[3 * number + 1])
            weights |= new_linear(output, units, size, keys[3 * number + 2], gain=0.01)
        return weights

    def forward(
        self,
        weights: Weights,
        observations: mx.array,
        starts: mx.array,
        states: Mapping[str, mx.array],
    ) -> tuple[mx.array, mx.array]:
        """See ``Network``."""
        del starts, states
        outputs: list[mx.array] = []
        for side, output in (("pi", "logits"), ("vf", "value")):
            hidden = mx.tanh(linear(weights, f"{side}.0", observations))
            hidden = mx.tanh(linear(weights, f"{side}.2", hidden))
            outputs.append(linear(weights, output, hidden))
        return outputs[0], outputs[1][..., 0]


class Memory:
    """One LSTM of 64 units that sees places alone, and has to find out their velocities."""

    num_inputs, num_units = 2, 64
    state_shapes: Mapping[str, tuple[int, ...]] = MappingProxyType(
        {"lstm.h": (1, num_units), "lstm.c": (1, num_units)}
    )
    # FACTOR: angles are below 0.21 and change by some 0.01 in a step.
    FACTOR = 10.0

    def config(self) -> dict[str, Any]:
        """See ``Network``."""
        layers: list[Layer] = [
            {"name": "scaled", "type": "scale", "inputs": ["obs"], "factor": self.FACTOR},
            {
                "name": "lstm",
                "type": "lstm",
                "inputs": ["scaled"],
                "input_size": self.num_inputs,
                "hidden_size": self.num_units,
                "num_layers": 1,
            },
            linear_layer("logits", "lstm", self.num_units, NUM_ACTIONS),
            linear_layer("value", "lstm", self.num_units, 1),
        ]
        return net_config([-1, -1, self.num_inputs], [-1, -1], layers)

    def new_weights(self, seed: int) -> Weights:
        """See ``Network``."""
        keys = mx.random.split(mx.random.key(seed), 4)
        bound = 1 / math.sqrt(self.num_units)
        gates = 4 * self.num_units
        return {
            "lstm.weight_ih_l0": mx.random.uniform(
                -bound, bound, (gates, self.num_inputs), key=keys[0]
            ),
            "lstm.weight_hh_l0": mx.random.uniform(
                -bound, bound, (gates, self.num_units), key=keys[1]
            ),
            "lstm.bias_ih_l0": mx.zeros(gates),
            "lstm.bias_hh_l0": mx.zeros(gates),
            **new_linear("logits", self.num_units, NUM_ACTIONS, keys[2], gain=0.01),
            **new_linear("value", self.num_units, 1, keys[3], gain=0.01),
        }

    def forward(
        self,
        weights: Weights,
        observations: mx.array,
        starts: mx.array,
        states: Mapping[str, mx.array],
    ) -> tuple[mx.array, mx.array]:
        """See ``Network``."""
        hidden, cell = (states[name][:, 0] for name in ("lstm.h", "lstm.c"))
        inputs = (self.FACTOR * observations) @ weights["lstm.weight_ih_l0"].T
        inputs = inputs + weights["lstm.bias_ih_l0"] + weights["lstm.bias_hh_l0"]
        outputs: list[mx.array] = []
        for time in range(observations.shape[1]):
            goes_on = mx.logical_not(starts[:, time, None])
            hidden, cell = hidden * goes_on, cell * goes_on
            gates = inputs[:, time] + hidden @ weights["lstm.weight_hh_l0"].T
            enter, forget, change, leave = mx.split(gates, 4, axis=-1)
            cell = mx.sigmoid(forget) * cell + mx.sigmoid(enter) * mx.tanh(change)
            hidden = mx.sigmoid(leave) * mx.tanh(cell)
            outputs.append(hidden)
        features = mx.stack(outputs, axis=1)
        return linear(weights, "logits", features), linear(weights, "value", features)[..., 0]


def linear(weights: Weights, name: str, inputs: mx.array) -> mx.array:
    """Return what a linear layer makes of its inputs."""
    return inputs @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def new_linear(
    name: str, num_inputs: int, num_outputs: int, key: mx.array, gain: float = 1.0
) -> Weights:
    """Return the weights of a new linear layer; a small gain makes it near zero."""
    noise = mx.random.normal((num_outputs, num_inputs), key=key)
    return {
        f"{name}.weight": noise * (gain / math.sqrt(num_inputs)),
        f"{name}.bias": mx.zeros(num_outputs),
    }


def linear_layer(name: str, source: str, num_inputs: int, num_outputs: int) -> Layer:
    """Return a linear layer as ``config.json`` has it."""
    return {
        "name": name,
        "type": "linear",
        "inputs": [source],
        "in_features": num_inputs,
        "out_features": num_outputs,
    }


def net_config(shape: list[int], rows: list[int], layers: list[Layer]) -> dict[str, Any]:
    """Return the ``config.json`` of an actor-critic with outputs ``logits`` and ``value``."""
    return {
        "model_type": "mlx_parallm_net",
        "inputs": [{"name": "obs", "dtype": "float32", "shape": shape}],
        "outputs": [
            {"name": "logits", "dtype": "float32", "shape": [*rows, NUM_ACTIONS]},
            {"name": "value", "dtype": "float32", "shape": [*rows, 1]},
        ],
        "layers": layers,
        "policy": {"distribution": "categorical", "logits": "logits", "value": "value"},
    }


def save(network: Network, weights: Weights, folder: Path) -> None:
    """Write the folder that the server serves."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps(network.config(), indent=2) + "\n", encoding="utf-8"
    )
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
