"""Refusals of nets: each names what is wrong, and the folder."""

from __future__ import annotations

import json
import pkgutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.models import nets
from mlx_parallm.models.nets.plan import MAX_CONFIG_BYTES, MAX_LAYERS, parse_net, read_net
from mlx_parallm.types.errors import ModelLoadError
from tests.net_configs import POLICY, changed, net
from tests.refusal_sites import Site, passed_sites, refusal_sites


def acting(content: dict[str, Any]) -> dict[str, Any]:
    """Return a net whose last layer is a policy's action."""
    name = content["outputs"][0]["name"]
    return content | {"policy": {"distribution": "deterministic", "mean": name}}


CASES: list[tuple[dict[str, Any], str]] = [
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
            to={"distribution": "categorical", "logits": "mean", "low": [0, 0]} | {"high": [1, 1]},
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
    (
        changed("layers", to=[POLICY["layers"][1]] * (MAX_LAYERS + 1)),
        f"has {MAX_LAYERS + 1} entries",
    ),
    (
        net(
            [-1, 4],
            "int8",
            {"type": "scale", "factor": 2},
            {"type": "concat", "inputs": ["x", "0"]},
        ),
        "its inputs must all have whole numbers, or all",
    ),
    (
        net(
            [-1, 4],
            "float32",
            {"type": "linear", "in_features": 4, "out_features": 3},
            {"type": "add", "inputs": ["x", "0"]},
        ),
        "its inputs have sizes [4], [3], which must agree",
    ),
    (
        net([-1], "float32", {"type": "concat", "inputs": ["x", "x"]}),
        "its inputs have sizes [], []; all but the last must agree",
    ),
    (
        net([-1, 4], "int8", {"type": "multiply", "inputs": ["x", "x"]}),
        "its inputs must have floating point numbers",
    ),
    (
        net(
            [-1, 1100, 2],
            "int8",
            {"type": "slice", "stop": 1},
            {"type": "one_hot", "num_classes": 2},
            made=[1100, 1, 2],
        ),
        "input 'x': its whole numbers have 1100 ranges of choices; at most 1024",
    ),
    (
        net(
            [-1, 300_000, 2],
            "int8",
            {"type": "slice", "stop": 1},
            {"type": "one_hot", "num_classes": 2},
            made=[300_000, 1, 2],
        ),
        "layer '0': embedding and one_hot read whole numbers in more than 262144 pieces",
    ),
    *(
        (
            net(
                [-1, 64],
                "float32",
                {"type": "linear", "in_features": 64, "out_features": 2, "quantization": fields},
            ),
            text,
        )
        for fields, text in (
            ({"group_size": 16}, "quantization: group_size must be one of [32, 64, 128]"),
            ({"mode": "mxfp4"}, 'quantization: mode must be "affine"'),
        )
    ),
    (
        net(
            [-1, 3, 4, 4],
            "float32",
            {"type": "conv2d", "in_channels": 3, "out_channels": 2, "kernel_size": 1, "groups": 2},
        ),
        "in_channels and out_channels must be multiples of groups",
    ),
    (
        net([-1, 3, 4, 4], "float32", {"type": "max_pool2d", "kernel_size": 3, "padding": 2}),
        "padding must be at most half of kernel_size",
    ),
    (
        net([-1, 4, 4], "float32", {"type": "avg_pool2d", "kernel_size": 2}),
        "'x' must be an image: channels, height and width",
    ),
    (
        net([-1, 4], "float32", {"type": "layer_norm", "normalized_shape": []}),
        "normalized_shape must have a size, and eps must not be negative",
    ),
    (
        net([-1, 4], "float32", {"type": "batch_norm", "num_features": 4, "eps": -1}),
        "eps must not be negative",
    ),
    (
        net([-1, 4], "float32", {"type": "normalize", "shape": [4], "clip": 0}),
        "epsilon must not be negative, and clip must be positive",
    ),
    (
        acting(net([-1, 2, 3], "float32", {"type": "identity"}, made=[2, 3])),
        "mean: output '0' must have one dimension after the rows",
    ),
    (
        acting(net([-1, 2], "int8", {"type": "identity"}, made=[2], makes="int8")),
        "mean: output '0' must have floating point numbers",
    ),
]


@pytest.mark.parametrize(("content", "text"), CASES)
def test_what_cannot_be_computed_is_refused(content: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        parse_net(content)
    assert text in str(caught.value)
    assert str(caught.value).startswith("config.json: ")


def test_every_refusal_of_a_config_has_a_case_and_names_the_folder(tmp_path: Path) -> None:
    passed: set[Site] = set()
    file = tmp_path / "config.json"
    for content in [
        *(json.dumps(content) for content, _ in CASES),
        "[1]",
        "{",
        " " * (MAX_CONFIG_BYTES + 1),
    ]:
        file.write_text(content)
        with pytest.raises(ModelLoadError) as caught:
            read_net(tmp_path)
        assert str(caught.value).startswith(f"{tmp_path}")
        passed |= passed_sites(caught.value)
    modules = [
        import_module(each.name)
        for each in pkgutil.iter_modules(nets.__path__, "mlx_parallm.models.nets.")
    ]
    sites = set[Site]().union(*(refusal_sites(module, ModelLoadError) for module in modules))
    assert len(sites) > 60
    assert sorted(sites - passed) == []
