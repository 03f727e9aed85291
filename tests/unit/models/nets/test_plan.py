"""The reading of ``config.json`` of nets."""

from __future__ import annotations

import copy
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.models.nets.dense import Conv2d, MaxPool2d, Window
from mlx_parallm.models.nets.layer import MAX_RANK, MAX_ROW_SIZE
from mlx_parallm.models.nets.plan import (
    LAYER_TYPES,
    MAX_CONFIG_BYTES,
    MAX_LAYERS,
    MAX_TENSORS,
    is_net,
    parse_net,
    read_net,
)
from mlx_parallm.models.nets.pointwise import (
    Activation,
    BatchNorm,
    LayerNorm,
    Normalize,
    Scale,
)
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.types.nets import Distribution, TensorSpec

POLICY: dict[str, Any] = {
    "model_type": "mlx_parallm_net",
    "transformers_version": "5.0",
    "inputs": [{"name": "obs", "dtype": "float32", "shape": [-1, 4]}],
    "layers": [
        {"name": "pi.0", "type": "linear", "inputs": ["obs"], "in_features": 4, "out_features": 8},
        {"name": "pi.1", "type": "tanh", "inputs": ["pi.0"]},
        {"name": "head", "type": "linear", "inputs": ["pi.1"], "in_features": 8, "out_features": 2},
        {"name": "log_std", "type": "parameter", "shape": [2]},
        {
            "name": "value",
            "type": "linear",
            "inputs": ["pi.1"],
            "in_features": 8,
            "out_features": 1,
            "bias": False,
        },
    ],
    "outputs": [
        {"name": "mean", "from": "head", "dtype": "float32", "shape": [-1, 2]},
        {"name": "log_std", "dtype": "float32", "shape": [-1, 2]},
        {"name": "value", "dtype": "float32", "shape": [-1, 1]},
    ],
    "policy": {
        "distribution": "gaussian",
        "mean": "mean",
        "log_std": "log_std",
        "value": "value",
        "low": [-1, -2.5],
        "high": [1, 2.5],
    },
}


def changed(*path: str | int, to: Any) -> dict[str, Any]:
    """Return the policy with a field changed; ``...`` removes it."""
    content = copy.deepcopy(POLICY)
    place: Any = content
    for step in path[:-1]:
        place = place[step]
    if to is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return content


def net(shape: list[int], dtype: str, *layers: dict[str, Any]) -> dict[str, Any]:
    """Return a net of layers in a row, without its outputs' shapes."""
    names = ["x", *(str(place) for place in range(len(layers)))]
    listed = [
        {"name": name, "inputs": [source]} | layer
        for source, name, layer in zip(names, names[1:], layers, strict=False)
    ]
    return {
        "model_type": "mlx_parallm_net",
        "inputs": [{"name": "x", "dtype": dtype, "shape": shape}],
        "layers": listed,
        "outputs": [{"name": names[-1], "shape": [-1]}],
    }


def shape_of(content: dict[str, Any]) -> str:
    """Return the shape that the reader says a net's last layer makes."""
    with pytest.raises(ModelLoadError) as caught:
        parse_net(content)
    text = str(caught.value)
    return text.partition("its layer makes ")[2] or text


def test_a_policy_is_read() -> None:
    plan = parse_net(POLICY)
    assert plan.signature.inputs == (TensorSpec("obs", "float32", (-1, 4)),)
    assert [spec.shape for spec in plan.signature.outputs] == [(-1, 2), (-1, 2), (-1, 1)]
    assert plan.sources == {"mean": "head", "log_std": "log_std", "value": "value"}
    assert [layer.name for layer in plan.layers] == ["pi.0", "pi.1", "head", "log_std", "value"]
    assert not plan.signature.states
    policy = plan.signature.policy
    assert policy is not None
    assert policy.distribution is Distribution.GAUSSIAN
    assert (policy.low, policy.high) == ((-1, -2.5), (1, 2.5))
    shapes = {name: parameter.shape for name, parameter in plan.parameters.items()}
    assert shapes == {
        "pi.0.weight": (8, 4),
        "pi.0.bias": (8,),
        "head.weight": (2, 8),
        "head.bias": (2,),
        "log_std.value": (2,),
        "value.weight": (1, 8),
    }
    assert pickle.loads(pickle.dumps(plan)) == plan


@pytest.mark.parametrize(
    ("shape", "dtype", "layers", "made"),
    [
        ([-1, 3, 8, 6], "float32", [{"type": "flatten"}], [-1, 144]),
        (
            [-1, 4, 84, 84],
            "uint8",
            [
                {"type": "scale", "factor": 1 / 255},
                {
                    "type": "conv2d",
                    "in_channels": 4,
                    "out_channels": 32,
                    "kernel_size": 8,
                    "stride": 4,
                },
                {
                    "type": "conv2d",
                    "in_channels": 32,
                    "out_channels": 8,
                    "kernel_size": [4, 3],
                    "stride": [2, 1],
                    "padding": [0, 1],
                },
            ],
            [-1, 8, 9, 20],
        ),
        (
            [-1, 2, 9, 9],
            "float32",
            [{"type": "max_pool2d", "kernel_size": 3}, {"type": "flatten"}],
            [-1, 18],
        ),
        (
            [-1, 2, 9, 9],
            "float32",
            [{"type": "avg_pool2d", "kernel_size": 2, "stride": 1, "padding": 1}],
            [-1, 2, 10, 10],
        ),
        (
            [-1, -1],
            "int64",
            [
                {"type": "embedding", "num_embeddings": 9, "embedding_dim": 5},
                {"type": "lstm", "input_size": 5, "hidden_size": 3, "num_layers": 2},
                {"type": "gru", "input_size": 3, "hidden_size": 4},
                {"type": "layer_norm", "normalized_shape": 4},
                {"type": "softmax"},
            ],
            [-1, -1, 4],
        ),
        ([-1], "int32", [{"type": "one_hot", "num_classes": 6}], [-1, 6]),
        ([-1, 5], "uint8", [{"type": "slice", "start": 1, "stop": 3}], [-1, 2]),
        ([-1, 5], "int8", [{"type": "normalize", "shape": [5], "clip": 10}], [-1, 5]),
        ([-1, 5, 2], "float16", [{"type": "batch_norm", "num_features": 5}], [-1, 5, 2]),
        ([-1, 5], "float32", [{"type": "concat", "inputs": ["x", "x"]}], [-1, 10]),
        ([-1, 5], "float32", [{"type": "add", "inputs": ["x", "x"]}], [-1, 5]),
        ([-1, 5], "float32", [{"type": "clip", "low": -20, "high": 2}], [-1, 5]),
    ],
)
def test_shapes_follow_from_the_layers(
    shape: list[int], dtype: str, layers: list[dict[str, Any]], made: list[int]
) -> None:
    content = net(shape, dtype, *layers)
    if made != [-1]:
        assert shape_of(content) == str(made)
    is_integer = layers[0]["type"] == "slice"
    content["outputs"][0] |= {"shape": made, "dtype": dtype if is_integer else "float32"}
    assert parse_net(content).signature.outputs[0].shape == tuple(made)


def test_states_are_named_by_their_layers() -> None:
    plan = parse_net(
        {
            "model_type": "mlx_parallm_net",
            "inputs": [{"name": "x", "shape": [-1, -1, 2]}],
            "layers": [
                {"name": "a", "type": "lstm", "inputs": ["x"], "input_size": 2, "hidden_size": 3},
                {
                    "name": "b",
                    "type": "gru",
                    "inputs": ["a"],
                    "input_size": 3,
                    "hidden_size": 4,
                    "num_layers": 2,
                    "bias": False,
                },
            ],
            "outputs": [{"name": "b", "shape": [-1, -1, 4]}],
        }
    )
    assert plan.signature.states == (
        TensorSpec("a.h", "float32", (-1, 1, 3)),
        TensorSpec("a.c", "float32", (-1, 1, 3)),
        TensorSpec("b.h", "float32", (-1, 2, 4)),
    )
    assert plan.signature.has_time
    assert plan.parameters["a.weight_ih_l0"].shape == (12, 2)
    assert plan.parameters["b.weight_ih_l1"].shape == (12, 4)
    assert "b.bias_ih_l0" not in plan.parameters


def test_whole_numbers_have_the_limit_of_their_tables() -> None:
    content = net([-1, 3], "int32", {"type": "embedding", "num_embeddings": 9, "embedding_dim": 2})
    content["layers"].append({"name": "1", "type": "one_hot", "inputs": ["x"], "num_classes": 5})
    content["outputs"] = [{"name": "0", "shape": [-1, 3, 2]}, {"name": "1", "shape": [-1, 3, 5]}]
    assert parse_net(content).signature.inputs[0].num_choices == 5
    content["layers"].reverse()
    assert parse_net(content).signature.inputs[0].num_choices == 5
    # Each slice has choices of its own.
    content["layers"] = [
        {"name": "first", "type": "slice", "inputs": ["x"], "stop": 1},
        {"name": "1", "type": "one_hot", "inputs": ["first"], "num_classes": 5},
    ]
    content["outputs"] = [{"name": "1", "shape": [-1, 1, 5]}]
    assert parse_net(content).signature.inputs[0].num_choices is None


def test_defaults_are_those_of_torch() -> None:
    kinds: list[dict[str, Any]] = [
        {"type": "conv2d", "in_channels": 1, "out_channels": 1, "kernel_size": 3},
        {"type": "max_pool2d", "kernel_size": [2, 3]},
        {"type": "layer_norm", "normalized_shape": 2},
        {"type": "batch_norm", "num_features": 1},
        {"type": "elu"},
        {"type": "leaky_relu"},
        {"type": "gelu"},
        {"type": "normalize", "shape": [1, 3, 2]},
        {"type": "scale", "factor": 2},
    ]
    content = net([-1, 1, 8, 8], "float32", *kinds)
    content["outputs"][0]["shape"] = [-1, 1, 3, 2]
    conv, pool, layer_norm, batch_norm, elu, leaky, gelu, normalize, scale = parse_net(
        content
    ).layers
    assert isinstance(conv, Conv2d)
    assert conv.window == Window(size=(3, 3), stride=(1, 1), padding=(0, 0), dilation=(1, 1))
    assert (conv.groups, conv.has_bias) == (1, True)
    assert isinstance(pool, MaxPool2d)
    assert pool.window == Window(size=(2, 3), stride=(2, 3), padding=(0, 0))
    assert isinstance(layer_norm, LayerNorm)
    assert (layer_norm.eps, layer_norm.has_weight, layer_norm.has_bias) == (1e-5, True, True)
    assert isinstance(batch_norm, BatchNorm)
    assert (batch_norm.eps, batch_norm.has_weight, batch_norm.has_bias) == (1e-5, True, True)
    assert isinstance(elu, Activation)
    assert isinstance(leaky, Activation)
    assert (elu.slope, leaky.slope) == (1.0, 0.01)
    assert isinstance(gelu, Activation)
    assert not gelu.by_tanh
    assert isinstance(normalize, Normalize)
    assert (normalize.epsilon, normalize.clip) == (1e-8, None)
    assert isinstance(scale, Scale)
    assert scale.offset == 0


def test_a_quantised_linear_has_packed_weights() -> None:
    layer = {
        "type": "linear",
        "in_features": 64,
        "out_features": 8,
        "quantization": {"group_size": 32, "bits": 4, "mode": "affine"},
    }
    content = net([-1, 64], "float32", layer)
    content["outputs"][0]["shape"] = [-1, 8]
    parameters = parse_net(content).parameters
    assert parameters["0.weight"].shape == (8, 8)
    assert parameters["0.weight"].dtypes == ("uint32",)
    assert parameters["0.scales"].shape == parameters["0.biases"].shape == (8, 2)
    assert parameters["0.bias"].shape == (8,)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (changed("model_type", to="llama"), "model_type must be 'mlx_parallm_net'"),
        (changed("inputs", to=...), "the net: inputs is missing"),
        (changed("inputs", to=[]), "inputs is empty"),
        (changed("inputs", to={"obs": [-1, 4]}), "inputs must be a list"),
        (changed("inputs", 0, to="obs"), "input 0 must be an object"),
        (changed("inputs", 0, "name", to=""), "input 0: name must be a text"),
        (changed("inputs", 0, "name", to="n" * 257), "input 0: name must be a text"),
        (changed("inputs", 0, "dtype", to="float64"), "input 0 ('obs'): dtype must be one of"),
        (changed("inputs", 0, "dtype", to="object"), "input 0 ('obs'): dtype must be one of"),
        (changed("inputs", 0, "shape", to=[4]), "input 0 ('obs'): shape is [4]"),
        (changed("inputs", 0, "shape", to=[]), "input 0 ('obs'): shape is []"),
        (changed("inputs", 0, "shape", to=[-1, 4, -1]), "input 0 ('obs'): shape is [-1, 4, -1]"),
        (changed("inputs", 0, "shape", to=[-1, 0]), "input 0 ('obs'): shape is [-1, 0]"),
        (changed("inputs", 0, "shape", to=[-1, True]), "shape must be a whole number"),
        (changed("inputs", 0, "shape", to=[-1, 4.0]), "shape must be a whole number"),
        (changed("inputs", 0, "shape", to=[-1, 10**30]), "shape must be a whole number"),
        (changed("inputs", 0, "shape", to=[-1, 2**29, 4]), "numbers; at most"),
        (changed("inputs", 0, "shape", to=[-1] + [1] * 9), "9 dimensions; at most 8"),
        (changed("inputs", 0, "shpe", to=[-1]), "input 0 ('obs'): unknown fields: shpe"),
        (changed("inputs", to=POLICY["inputs"] * 2), "two inputs have one name"),
        (changed("layers", 0, "type", to="conv9d"), "layer 'pi.0': type 'conv9d' is not known"),
        (changed("layers", 0, "type", to="identity"), "layer 'pi.0': unknown fields: in_features"),
        (changed("layers", 0, "type", to=["linear"]), "layer 'pi.0': type must be a text"),
        (changed("layers", 0, "in_features", to=5), "'obs' has sizes [4]; the last must be 5"),
        (changed("layers", 0, "in_features", to="4"), "in_features must be a whole number"),
        (changed("layers", 0, "out_features", to=0), "out_features must be a whole number"),
        (changed("layers", 0, "out_features", to=2**30), "numbers; at most"),
        (changed("layers", 0, "bias", to=1), "layer 'pi.0': bias must be true or false"),
        (changed("layers", 0, "inputs", to=["nope"]), "it reads 'nope', which is unknown"),
        (changed("layers", 0, "inputs", to=["pi.0"]), "it reads 'pi.0', which comes after it"),
        (changed("layers", 0, "inputs", to=["pi.1"]), "it reads 'pi.1', which comes after it"),
        (changed("layers", 0, "inputs", to=[]), "layer 'pi.0': inputs is empty"),
        (changed("layers", 0, "inputs", to="obs"), "layer 'pi.0': inputs must be a list"),
        (changed("layers", 0, "inputs", to=["obs", "obs"]), "has 2 inputs; it takes one"),
        (changed("layers", 1, "name", to="obs"), "layer 'obs': an input or a layer before it"),
        (changed("layers", 1, "name", to="pi.0"), "layer 'pi.0': an input or a layer before it"),
        (changed("layers", 3, "inputs", to=["obs"]), "a parameter has no inputs"),
        (changed("outputs", to=...), "outputs is missing"),
        (changed("outputs", 1, "from", to="nope"), "there is no input or layer 'nope'"),
        (changed("outputs", 2, "name", to="mean"), "there is no input or layer 'mean'"),
        (changed("outputs", 1, "shape", to=[-1, 3]), "its layer makes [-1, 2]"),
        (changed("outputs", 1, "shape", to=[-1, -1, 2]), "its layer makes [-1, 2]"),
        (changed("outputs", 1, "dtype", to="int64"), "its layer makes floating point numbers"),
        (
            changed("outputs", to=[POLICY["outputs"][0], POLICY["outputs"][0]]),
            "output 1 ('mean'): an output before it has its name",
        ),
        (changed("allow_non_finite", to="yes"), "allow_non_finite must be true or false"),
        (changed("policy", to="gaussian"), "policy must be an object"),
        (changed("policy", "distribution", to="cauchy"), "distribution must be one of"),
        (changed("policy", "mean", to="nope"), "mean names 'nope', which is no output"),
        (changed("policy", "mean", to=...), "mean is missing"),
        (changed("policy", "log_std", to="value"), "'value' has sizes [1], and the mean [2]"),
        (changed("policy", "log_std", to=...), "log_std is missing"),
        (changed("policy", "value", to="mean"), "'mean' must be one number a row"),
        (changed("policy", "low", to=[-1]), "with 2 numbers each"),
        (changed("policy", "low", to=...), "low and high must both be there"),
        (changed("policy", "low", to=[1, 0]), "low must be less than high"),
        (changed("policy", "low", to=[float("nan"), 0]), "low must be a number"),
        (changed("policy", "lows", to=[0, 0]), "unknown fields: lows"),
        (
            changed(
                "policy",
                to={"distribution": "multi_categorical", "logits": "mean", "sizes": [2, 3]},
            ),
            "sizes add up to 5, and 'mean' has 2 logits",
        ),
        (
            changed(
                "policy",
                to={"distribution": "deterministic", "mean": "mean", "low": [-1e999, 0]}
                | {"high": [1, 1]},
            ),
            "low and high must be finite",
        ),
        (
            changed(
                "policy",
                to={"distribution": "categorical", "logits": "mean", "low": [0, 0]}
                | {"high": [1, 1]},
            ),
            "a categorical policy has no low and high",
        ),
        (net([-1, 4], "int8", {"type": "tanh"}), "'x' has whole numbers: scale"),
        (net([-1, 4], "float32", {"type": "one_hot", "num_classes": 2}), "must have whole numbers"),
        (net([-1, 4], "float32", {"type": "scale"}), "factor is missing"),
        (net([-1, 4], "float32", {"type": "scale", "factor": 1e999}), "factor must be finite"),
        (net([-1, 4], "float32", {"type": "clip"}), "low or high is missing"),
        (net([-1, 4], "float32", {"type": "clip", "low": 1, "high": 0}), "low must not exceed"),
        (net([-1, 4], "float32", {"type": "slice", "start": 2, "stop": 5}), "stop is 5"),
        (net([-1, 4], "float32", {"type": "slice", "start": 2, "stop": 2}), "start must be less"),
        (net([-1, 4], "float32", {"type": "gelu", "approximate": "x"}), "approximate must be"),
        (net([-1], "float32", {"type": "softmax"}), "no dimension besides its rows"),
        (net([-1, 4], "float32", {"type": "normalize", "shape": [5]}), "they must be [5] (shape)"),
        (net([-1, 4], "float32", {"type": "layer_norm", "normalized_shape": [5]}), "[5] (norm"),
        (net([-1, 4], "float32", {"type": "batch_norm", "num_features": 5}), "the first must be 5"),
        (
            net([-1, 4], "float32", {"type": "lstm", "input_size": 4, "hidden_size": 2}),
            "'x' has no time: declare its input as [-1, -1, ...]",
        ),
        (
            net([-1, -1, 4], "float32", {"type": "gru", "input_size": 5, "hidden_size": 2}),
            "they must be [5] (input_size)",
        ),
        (
            net(
                [-1, -1, 4],
                "float32",
                {"type": "lstm", "input_size": 4, "hidden_size": 2, "num_layers": 10**6},
            ),
            "num_layers must be at most 64",
        ),
        (
            net(
                [-1, -1, 4],
                "float32",
                {"type": "lstm", "input_size": 4, "hidden_size": 2, "bidirectional": True},
            ),
            "unknown fields: bidirectional",
        ),
        (
            net(
                [-1, 3, 4, 4],
                "float32",
                {"type": "conv2d", "in_channels": 3, "out_channels": 2, "kernel_size": 5},
            ),
            "an image of 4x4 is smaller than its window",
        ),
        (
            net(
                [-1, 4, 4, 3],
                "float32",
                {"type": "conv2d", "in_channels": 3, "out_channels": 2, "kernel_size": 2},
            ),
            "must be an image of 3 channels",
        ),
        (
            net(
                [-1, 3, 4, 4],
                "float32",
                {"type": "conv2d", "in_channels": 3, "out_channels": 2, "kernel_size": [1, 1, 1]},
            ),
            "kernel_size must be a whole number, or two",
        ),
        (
            net(
                [-1, 48],
                "float32",
                {
                    "type": "linear",
                    "in_features": 48,
                    "out_features": 2,
                    "quantization": {"group_size": 32},
                },
            ),
            "in_features must be a multiple of group_size (32)",
        ),
        (
            net(
                [-1, 64],
                "float32",
                {
                    "type": "linear",
                    "in_features": 64,
                    "out_features": 2,
                    "quantization": {"bits": 7},
                },
            ),
            "quantization: bits must be one of",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused(content: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        parse_net(content)
    assert text in str(caught.value)
    assert str(caught.value).startswith("config.json: ")


def test_too_many_layers_are_refused() -> None:
    content = changed("layers", to=[POLICY["layers"][1]] * (MAX_LAYERS + 1))
    with pytest.raises(ModelLoadError, match=rf"layers has {MAX_LAYERS + 1} entries"):
        parse_net(content)


def test_tensors_that_double_are_refused() -> None:
    layers = [{"type": "concat", "inputs": ["x", "x"]}]
    layers += [{"type": "concat", "inputs": [str(at)] * 2} for at in range(40)]
    with pytest.raises(ModelLoadError, match=r"layer '20': a row would have 8388608 numbers"):
        parse_net(net([-1, 4], "float32", *layers))


def written(folder: Path, content: str | bytes) -> Path:
    """Return a folder with a ``config.json``."""
    data = content if isinstance(content, bytes) else content.encode()
    (folder / "config.json").write_bytes(data)
    return folder


def test_a_folder_is_read(tmp_path: Path) -> None:
    folder = written(tmp_path, json.dumps(POLICY, indent=1))
    assert is_net(folder)
    assert read_net(folder) == parse_net(POLICY)


def test_a_refusal_names_the_folder(tmp_path: Path) -> None:
    folder = written(tmp_path, json.dumps(changed("layers", 0, "inputs", to=["pi.1"])))
    with pytest.raises(ModelLoadError) as caught:
        read_net(folder)
    assert str(caught.value).startswith(f"{folder}: config.json: layer 'pi.0': it reads 'pi.1'")


@pytest.mark.parametrize("before", range((1 << 20) - 40, (1 << 20) + 2, 7))
def test_the_type_is_found_wherever_it_is(tmp_path: Path, before: int) -> None:
    field = '"model_type": "mlx_parallm_net"'
    assert is_net(written(tmp_path, f"{{{' ' * before}{field}}}"))


def test_a_large_config_is_refused_unparsed(tmp_path: Path) -> None:
    layer = json.dumps(POLICY["layers"][1])
    count = MAX_CONFIG_BYTES // len(layer)
    start = '{"layers": [' + ", ".join([layer] * count)
    folder = written(tmp_path, start + '], "model_type" : "mlx_parallm_net"}')
    assert is_net(folder)
    with pytest.raises(ModelLoadError, match=r"a net's may have 4 MiB"):
        read_net(folder)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b'{"model_type": "mlx_parallm_net"', b"[" * 100_000, b"[1]", b"1" * 5000],
)
def test_what_is_no_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        read_net(written(tmp_path, content))


def test_other_folders_are_no_nets(tmp_path: Path) -> None:
    assert not is_net(tmp_path)
    assert not is_net(written(tmp_path, ""))
    assert not is_net(written(tmp_path, '{"model_type": "llama"}'))
    with pytest.raises(ModelLoadError, match="cannot be read"):
        read_net(tmp_path / "none")


def test_weights_must_fit() -> None:
    plan = parse_net(POLICY)
    tensors = {name: (form.shape, "float32") for name, form in plan.parameters.items()}
    assert plan.weight_fault(tensors) is None
    assert plan.weight_fault(tensors | {"pi.0.bias": ((8,), "bfloat16")}) is None
    faults = [
        plan.weight_fault(tensors | {"pi.0.bias": ((9,), "float32")}),
        plan.weight_fault(tensors | {"pi.0.bias": ((8,), "int32")}),
        plan.weight_fault(tensors | {"extra": ((), "float32")}),
        plan.weight_fault({"head.bias": ((2,), "float32")}),
    ]
    assert faults == [
        "'pi.0.bias' has shape [9]; it must be [8]",
        "'pi.0.bias' is int32; it must be float32 or float16 or bfloat16",
        "'extra' is no weight of this net",
        "the weight 'pi.0.weight' is missing",
    ]
    assert plan.weight_fault({"head.bias": ((2,), "float32")}, is_whole=False) is None


def test_the_page_lists_all_layers_and_limits() -> None:
    page = (Path(__file__).parents[4] / "docs" / "nets.md").read_text(encoding="utf-8")
    table = page.partition("| `type` |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert set(re.findall(r"`(\w+)`", " ".join(cells))) == set(LAYER_TYPES)
    for limit in (MAX_LAYERS, MAX_TENSORS, MAX_ROW_SIZE, MAX_RANK):
        assert f"{limit:,}" in page
    assert f"{MAX_CONFIG_BYTES >> 20} MiB" in page
