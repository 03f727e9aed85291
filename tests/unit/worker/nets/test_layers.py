"""Layers of nets against torch, and what holds for any of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.models.nets.plan import NetPlan, parse_net
from mlx_parallm.worker.nets.layers import forward

FOLDER = Path(__file__).parents[3] / "golden" / "nets"
FILES = sorted(FOLDER.glob("*.safetensors"))
ARRAYS = dict[str, mx.array]


@dataclass(frozen=True)
class Golden:
    """A net with inputs and torch's results."""

    plan: NetPlan
    weights: ARRAYS
    inputs: ARRAYS
    outputs: ARRAYS
    states: ARRAYS
    after: ARRAYS
    starts: mx.array | None


def golden(path: Path) -> Golden:
    loaded: Any = mx.load(str(path), return_metadata=True)
    tensors, metadata = loaded

    def part(name: str) -> ARRAYS:
        prefix = f"{name}/"
        return {
            key.removeprefix(prefix): array
            for key, array in tensors.items()
            if key.startswith(prefix)
        }

    return Golden(
        parse_net(json.loads(metadata["config"])),
        part("weights"),
        part("inputs"),
        part("outputs"),
        part("states"),
        part("next"),
        tensors.get("episode_start"),
    )


def named(name: str) -> Golden:
    return golden(FOLDER / f"{name}.safetensors")


def assert_close(got: ARRAYS, wanted: ARRAYS, tolerance: float = 1e-5) -> None:
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        assert got[name].shape == array.shape, name
        np.testing.assert_allclose(
            np.array(got[name]), np.array(array), rtol=0, atol=tolerance, err_msg=name
        )


def test_there_are_golden_values() -> None:
    assert len(FILES) >= 39


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_numbers_are_those_of_torch(path: Path) -> None:
    net = golden(path)
    forms = {
        name: (array.shape, str(array.dtype).rpartition(".")[2])
        for name, array in net.weights.items()
    }
    assert net.plan.weight_fault(forms) is None
    outputs, states = forward(net.plan, net.weights, net.inputs, net.states or None, net.starts)
    assert_close(outputs, net.outputs)
    assert_close(states, net.after)


@pytest.mark.parametrize("name", ["lstm", "lstm_layers", "gru_layers", "tokens", "image_lstm"])
def test_single_times_are_one_call_of_all(name: str) -> None:
    net = named(name)
    assert net.starts is not None
    states, steps = net.states, []
    for time in range(net.starts.shape[1]):
        outputs, states = forward(
            net.plan, net.weights, {"x": net.inputs["x"][:, time]}, states, net.starts[:, time]
        )
        steps.append(outputs["y"])
    whole, after = forward(net.plan, net.weights, net.inputs, net.states, net.starts)
    assert_close({"y": mx.stack(steps, axis=1)}, whole, 1e-6)
    assert_close(states, after, 1e-6)


def test_missing_states_are_zeros() -> None:
    net = named("lstm_layers")
    zeros = {name: mx.zeros_like(array) for name, array in net.states.items()}
    whole = forward(net.plan, net.weights, net.inputs, zeros)
    assert_close(forward(net.plan, net.weights, net.inputs)[0], whole[0], 0)
    only = {"1.c": zeros["1.c"]}
    assert_close(forward(net.plan, net.weights, net.inputs, only)[0], whole[0], 0)


def test_an_episode_begins_anew_after_an_infinite_state() -> None:
    net = named("lstm")
    states = {name: mx.full(array.shape, mx.inf) for name, array in net.states.items()}
    starts = mx.zeros(net.inputs["x"].shape[:2], mx.bool_)
    starts[:, 0] = True
    fresh, _ = forward(net.plan, net.weights, net.inputs)
    assert_close(forward(net.plan, net.weights, net.inputs, states, starts)[0], fresh, 0)


@pytest.mark.parametrize("name", ["mlp", "conv2d", "pools", "layer_norm_two", "embedding"])
def test_time_is_folded_into_rows_without_recurrence(name: str) -> None:
    net = named(name)
    (x,) = net.inputs.values()
    chunk = mx.stack([x, x[::-1], x], axis=1)
    outputs, _ = forward(net.plan, net.weights, {"x": chunk})
    y = net.outputs["y"]
    assert_close(outputs, {"y": mx.stack([y, y[::-1], y], axis=1)})


@pytest.mark.parametrize("name", ["mlp", "conv2d", "lstm_layers", "gru_layers"])
def test_rows_do_not_mix(name: str) -> None:
    net = named(name)
    (x,) = net.inputs.values()
    other = mx.concatenate([x[:2], x[2:] * 3 + 1])
    states = {key: mx.concatenate([state[:2], -state[2:]]) for key, state in net.states.items()}
    outputs, after = forward(net.plan, net.weights, {"x": other}, states or None, net.starts)
    assert_close({"y": outputs["y"][:2]}, {"y": net.outputs["y"][:2]})
    assert_close(
        {key: state[:2] for key, state in after.items()},
        {key: state[:2] for key, state in net.after.items()},
    )


def test_weights_are_arguments_of_compiled_functions() -> None:
    net = named("lstm_layers")

    def outputs(weights: ARRAYS, x: mx.array) -> mx.array:
        return forward(net.plan, weights, {"x": x})[0]["y"]

    compiled = mx.compile(outputs)
    first = compiled(net.weights, net.inputs["x"])
    changed = {name: array * 0.5 for name, array in net.weights.items()}
    second = compiled(changed, net.inputs["x"])
    assert_close({"y": second}, {"y": outputs(changed, net.inputs["x"])}, 1e-6)
    assert float(np.abs(np.array(first - second)).max()) > 1e-3


def net_of(inputs: dict[str, tuple[str, list[int]]], layers: list[dict[str, Any]]) -> NetPlan:
    """Return a net whose outputs are all its layers, with the shapes that ``shapes`` says."""
    outputs = [
        {"name": layer["name"], "shape": layer.pop("made"), "dtype": layer.pop("dtype", "float32")}
        for layer in layers
    ]
    return parse_net(
        {
            "model_type": "mlx_parallm_net",
            "inputs": [
                {"name": name, "dtype": dtype, "shape": shape}
                for name, (dtype, shape) in inputs.items()
            ],
            "layers": layers,
            "outputs": outputs,
        }
    )


def test_observations_are_prepared() -> None:
    plan = net_of(
        {
            "image": ("uint8", [-1, 1, 1, 2]),
            "choice": ("int64", [-1]),
            "obs": ("float32", [-1, 3]),
            "bits": ("bool", [-1, 2]),
        },
        [
            {"name": "s", "type": "scale", "inputs": ["image"], "factor": 1 / 255, "offset": -0.5}
            | {"made": [-1, 1, 1, 2]},
            {"name": "flat", "type": "flatten", "inputs": ["s"], "made": [-1, 2]},
            {"name": "hot", "type": "one_hot", "inputs": ["choice"], "num_classes": 3}
            | {"made": [-1, 3]},
            {"name": "n", "type": "normalize", "inputs": ["obs"], "shape": [3], "clip": 2}
            | {"epsilon": 1e-8, "made": [-1, 3]},
            {"name": "b", "type": "scale", "inputs": ["bits"], "factor": 1, "made": [-1, 2]},
            {"name": "all", "type": "concat", "inputs": ["flat", "hot", "n", "b"]}
            | {"made": [-1, 10]},
            {"name": "part", "type": "slice", "inputs": ["image"], "start": 1, "stop": 2}
            | {"made": [-1, 1, 1, 1], "dtype": "uint8"},
            {"name": "p", "type": "parameter", "shape": [2], "made": [-1, 2]},
            {"name": "sum", "type": "add", "inputs": ["flat", "p", "flat"], "made": [-1, 2]},
            {"name": "product", "type": "multiply", "inputs": ["flat", "p"], "made": [-1, 2]},
        ],
    )
    weights = {
        "n.mean": mx.array([1.0, 2.0, 3.0]),
        "n.variance": mx.array([4.0, 1.0, 0.0]),
        "p.value": mx.array([0.25, -2.0]),
    }
    inputs = {
        "image": mx.array([[[[255, 0]]], [[[51, 204]]]], mx.uint8),
        "choice": mx.array([2, 0]),
        "obs": mx.array([[3.0, -7.0, 4.0], [1.0, 2.5, 3.0]]),
        "bits": mx.array([[True, False], [False, False]]),
    }
    outputs, _ = forward(plan, weights, inputs)
    flat = [[0.5, -0.5], [-0.3, 0.3]]
    rest = [[0, 0, 1, 1, -2, 2, 1, 0], [1, 0, 0, 0, 0.5, 0, 0, 0]]
    assert_close(
        {"all": outputs["all"]}, {"all": mx.concatenate([mx.array(flat), mx.array(rest)], 1)}
    )
    assert outputs["part"].dtype == mx.uint8
    assert outputs["part"].tolist() == [[[[0]]], [[[204]]]]
    assert_close({"p": outputs["p"]}, {"p": mx.array([[0.25, -2.0]] * 2)}, 0)
    x = mx.array(flat)
    assert_close(
        {"sum": outputs["sum"], "product": outputs["product"]},
        {"sum": 2 * x + weights["p.value"], "product": x * weights["p.value"]},
        1e-6,
    )


def test_what_has_no_time_counts_at_each_time() -> None:
    plan = net_of(
        {"x": ("float32", [-1, -1, 2]), "goal": ("float32", [-1, 1])},
        [
            {"name": "both", "type": "concat", "inputs": ["x", "goal"], "made": [-1, -1, 3]},
            {"name": "bias", "type": "parameter", "shape": [3], "made": [-1, 3]},
            {"name": "y", "type": "add", "inputs": ["both", "bias"], "made": [-1, -1, 3]},
        ],
    )
    x = mx.arange(12.0).reshape(2, 3, 2)
    goal, bias = mx.array([[7.0], [8.0]]), mx.array([1.0, 2.0, 3.0])
    outputs, _ = forward(plan, {"bias.value": bias}, {"x": x, "goal": goal})
    wanted = mx.concatenate([x, mx.broadcast_to(goal[:, None], (2, 3, 1))], -1) + bias
    assert_close({"y": outputs["y"]}, {"y": wanted}, 0)
    outputs, _ = forward(plan, {"bias.value": bias}, {"x": x[:, 1], "goal": goal})
    assert_close({"y": outputs["y"]}, {"y": wanted[:, 1]}, 0)


def test_choices_beyond_a_table_read_nothing_else() -> None:
    net = named("embedding")
    x = mx.array([[0, 10, 3], [-1, 11, 3], [-(2**40), 2**40, 3]])
    outputs, _ = forward(net.plan, net.weights, {"x": x})
    rows = outputs["y"]
    assert mx.array_equal(rows[0], rows[1]).item()
    assert mx.array_equal(rows[0], rows[2]).item()


def test_grouped_convolutions_read_their_own_channels() -> None:
    # pytorch#19912: 4 channels to 16 in 2 groups gave zeros.
    layer = {"name": "c", "type": "conv2d", "inputs": ["x"], "in_channels": 4, "out_channels": 16}
    layer |= {"kernel_size": 1, "groups": 2, "bias": False, "made": [-1, 16, 1, 1]}
    plan = net_of({"x": ("float32", [-1, 4, 1, 1])}, [layer])
    x = mx.array([0.0, 0, 0, 1]).reshape(1, 4, 1, 1)
    outputs, _ = forward(plan, {"c.weight": mx.ones((16, 2, 1, 1))}, {"x": x})
    assert outputs["c"].flatten().tolist() == [0.0] * 8 + [1.0] * 8


def test_a_reset_gate_scales_the_product_with_its_bias() -> None:
    # pytorch#189225 and onnxscript#2852: the gate scaled the state before the product.
    layer = {"name": "g", "type": "gru", "inputs": ["x"], "input_size": 1, "hidden_size": 1}
    plan = net_of({"x": ("float32", [-1, -1, 1])}, [layer | {"made": [-1, -1, 1]}])
    zeros = mx.zeros((3, 1))
    bias_hh = mx.array([-100.0, -100.0, 1.0])
    weights = {"weight_ih_l0": zeros, "weight_hh_l0": zeros, "bias_ih_l0": zeros[:, 0]}
    outputs, _ = forward(
        plan,
        {f"g.{part}": array for part, array in (weights | {"bias_hh_l0": bias_hh}).items()},
        {"x": mx.zeros((1, 1, 1))},
    )
    assert outputs["g"].item() == 0.0


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize(("group_size", "bits"), [(32, 4), (64, 8), (128, 2), (64, 3), (64, 6)])
def test_quantised_linear_layers(dtype: mx.Dtype, group_size: int, bits: int) -> None:
    plan = net_of(
        {"x": ("float32", [-1, 128])},
        [
            {"name": "q", "type": "linear", "inputs": ["x"], "in_features": 128}
            | {"out_features": 32, "quantization": {"group_size": group_size, "bits": bits}}
            | {"made": [-1, 32]}
        ],
    )
    draw = mx.random.key(1)
    weight = mx.random.normal((32, 128), key=draw).astype(dtype)
    packed, scales, biases = mx.quantize(weight, group_size=group_size, bits=bits)
    weights = {"q.weight": packed, "q.scales": scales, "q.biases": biases}
    weights["q.bias"] = mx.arange(32).astype(dtype)
    forms = {
        name: (array.shape, str(array.dtype).rpartition(".")[2]) for name, array in weights.items()
    }
    assert plan.weight_fault(forms) is None
    x = mx.random.normal((5, 128), key=mx.random.key(2))
    outputs, _ = forward(plan, weights, {"x": x})
    # The product is made in the input's float32, however narrow the scales are.
    wide = [part.astype(mx.float32) for part in (scales, biases)]
    full = mx.dequantize(packed, *wide, group_size=group_size, bits=bits)
    wanted = x @ full.T + weights["q.bias"].astype(mx.float32)
    assert_close(outputs, {"q": wanted}, 5e-5)


def test_outputs_have_their_declared_dtypes() -> None:
    plan = net_of(
        {"x": ("float16", [-1, 2])},
        [
            {"name": "y", "type": "tanh", "inputs": ["x"], "made": [-1, 2], "dtype": "bfloat16"},
            {"name": "z", "type": "relu", "inputs": ["y"], "made": [-1, 2]},
        ],
    )
    outputs, _ = forward(plan, {}, {"x": mx.zeros((1, 2), mx.float16)})
    assert (outputs["y"].dtype, outputs["z"].dtype) == (mx.bfloat16, mx.float32)
