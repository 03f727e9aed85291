"""The reading of ``config.json`` of nets."""

from __future__ import annotations

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
from tests.net_configs import POLICY, net


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
