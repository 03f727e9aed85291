"""Write torch modules as the folder of a net. The environment needs torch, but not this package."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from safetensors.torch import save_file
from torch import nn  # pyright: ignore[reportMissingImports]


class UnknownPartError(ValueError):
    """A model has a part that no layer of a net computes."""


class NetWriter:
    """Collects the layers and weights of a net, which keep torch's names.

    Attributes:
        config: what becomes ``config.json``.
        weights: by their names in ``model.safetensors``.
    """

    def __init__(self, *, has_time: bool = False) -> None:
        """Begin a net whose tensors have a dimension of time after the rows, or none."""
        self.config: dict[str, Any] = {
            "model_type": "mlx_parallm_net",
            "inputs": [],
            "layers": [],
            "outputs": [],
        }
        self.weights: dict[str, torch.Tensor] = {}
        self._leading = [-1, -1] if has_time else [-1]

    def add_input(self, name: str, dtype: str, *sizes: int) -> str:
        """Add an input of rows with these sizes, and return its name."""
        tensor = {"name": name, "dtype": dtype, "shape": [*self._leading, *map(int, sizes)]}
        self.config["inputs"].append(tensor)
        return name

    def add_output(self, name: str, layer: str, *sizes: int, is_constant: bool = False) -> str:
        """Add an output, which is constant if all times share it, and return its name."""
        shape = [*([-1] if is_constant else self._leading), *map(int, sizes)]
        output = {"name": name, "dtype": "float32", "shape": shape, "from": layer}
        self.config["outputs"].append(output)
        return name

    def add(
        self,
        name: str,
        kind: str,
        *inputs: str,
        weights: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> str:
        """Add a layer with its weights (torch's or NumPy's), and return its name."""
        layer = {"name": name, "type": kind, "inputs": list(inputs), **fields}
        self.config["layers"].append(layer)
        for part, tensor in (weights or {}).items():
            self.weights[f"{name}.{part}"] = _stored(tensor)
        return name

    def add_module(self, name: str, module: nn.Module, source: str) -> str:
        """Add the layers of a module that reads ``source``, and return the last one's name.

        Raises:
            UnknownPartError: no layer computes what the module does.
        """
        if isinstance(module, nn.Sequential):
            for part, child in module.named_children():
                source = self.add_module(f"{name}.{part}" if name else part, child, source)
            return source
        describe = _MODULES.get(type(module))
        fields = None if describe is None else describe(module)
        if fields is None:
            raise UnknownPartError(f"{name} is {module}, which no layer of a net computes")
        kind = fields.pop("type")
        weights = module.state_dict()
        weights.pop("num_batches_tracked", None)
        return self.add(name, kind, source, weights=weights, **fields)

    def save(self, folder: Path) -> None:
        """Write the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        # Sizes of torch and SB3 may be NumPy's numbers.
        text = json.dumps(self.config, indent=1, default=lambda number: number.item()) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")
        save_file(self.weights, folder / "model.safetensors")


Fields = dict[str, Any]


def _stored(tensor: Any) -> torch.Tensor:
    """Return a weight (torch's or NumPy's) as it is stored: nets have no float64."""
    weight = torch.as_tensor(tensor).detach().cpu().clone().contiguous()
    return weight.float() if weight.dtype == torch.float64 else weight


def _plain(kind: str, *names: str) -> Callable[[Any], Fields]:
    """Return a description of modules by attributes that have the names of fields."""
    return lambda module: {"type": kind} | {name: getattr(module, name) for name in names}


def _linear(module: Any) -> Fields:
    return {
        "type": "linear",
        "in_features": module.in_features,
        "out_features": module.out_features,
        "bias": module.bias is not None,
    }


def _conv2d(module: Any) -> Fields | None:
    padding = _padding(module)
    if padding is None or module.padding_mode != "zeros":
        return None
    names = ("in_channels", "out_channels", "groups")
    return {
        "type": "conv2d",
        **{name: getattr(module, name) for name in names},
        "kernel_size": list(module.kernel_size),
        "stride": list(module.stride),
        "padding": padding,
        "dilation": list(module.dilation),
        "bias": module.bias is not None,
    }


def _padding(module: Any) -> list[int] | None:
    """Return a convolution's padding as numbers; None if that of the two sides differs."""
    if module.padding == "valid":
        return [0, 0]
    if module.padding != "same":
        return list(module.padding)
    pairs = zip(module.kernel_size, module.dilation, strict=True)
    both = [dilation * (size - 1) for size, dilation in pairs]
    return None if any(total % 2 for total in both) else [total // 2 for total in both]


def _max_pool(module: Any) -> Fields | None:
    if module.ceil_mode or module.dilation not in (1, (1, 1)):
        return None
    return _plain("max_pool2d", "kernel_size", "stride", "padding")(module)


def _avg_pool(module: Any) -> Fields | None:
    if module.ceil_mode or module.divisor_override or not module.count_include_pad:
        return None
    return _plain("avg_pool2d", "kernel_size", "stride", "padding")(module)


def _batch_norm(module: Any) -> Fields | None:
    if not module.track_running_stats:
        return None
    has_bias = not module.affine or module.bias is not None
    return _plain("batch_norm", "num_features", "eps", "affine")(module) | {"bias": has_bias}


def _over_last(kind: str) -> Callable[[Any], Fields | None]:
    return lambda module: {"type": kind} if module.dim == -1 else None


def _softplus(module: Any) -> Fields | None:
    return {"type": "softplus"} if (module.beta, module.threshold) == (1, 20) else None


def _embedding(module: Any) -> Fields | None:
    # A largest norm would change the table whenever it is read.
    if module.max_norm is not None:
        return None
    return _plain("embedding", "num_embeddings", "embedding_dim")(module)


def _layer_norm(module: Any) -> Fields:
    return {
        "type": "layer_norm",
        "normalized_shape": list(module.normalized_shape),
        "eps": module.eps,
        "elementwise_affine": module.elementwise_affine,
        "bias": module.bias is not None,
    }


def _flatten(module: Any) -> Fields | None:
    # Rows, and time with them, are what torch's first dimension is.
    return {"type": "flatten"} if (module.start_dim, module.end_dim) == (1, -1) else None


def _recurrent(kind: str) -> Callable[[Any], Fields | None]:
    def describe(module: Any) -> Fields | None:
        if module.bidirectional or module.proj_size:
            return None
        names = ("input_size", "hidden_size", "num_layers", "bias")
        return {"type": kind} | {name: getattr(module, name) for name in names}

    return describe


_MODULES: dict[type, Callable[[Any], Fields | None]] = {
    nn.Linear: _linear,
    nn.Conv2d: _conv2d,
    nn.LayerNorm: _layer_norm,
    nn.Flatten: _flatten,
    nn.LSTM: _recurrent("lstm"),
    nn.GRU: _recurrent("gru"),
    nn.Embedding: _embedding,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.MaxPool2d: _max_pool,
    nn.AvgPool2d: _avg_pool,
    nn.Identity: _plain("identity"),
    # A trained model drops nothing.
    nn.Dropout: _plain("identity"),
    nn.Tanh: _plain("tanh"),
    nn.ReLU: _plain("relu"),
    nn.ReLU6: _plain("relu6"),
    nn.Sigmoid: _plain("sigmoid"),
    nn.SiLU: _plain("silu"),
    nn.Mish: _plain("mish"),
    nn.SELU: _plain("selu"),
    nn.ELU: _plain("elu", "alpha"),
    nn.GELU: _plain("gelu", "approximate"),
    nn.LeakyReLU: _plain("leaky_relu", "negative_slope"),
    nn.Softplus: _softplus,
    nn.Softmax: _over_last("softmax"),
    nn.LogSoftmax: _over_last("log_softmax"),
    nn.Hardtanh: lambda module: {
        "type": "clip",
        "low": module.min_val,
        "high": module.max_val,
    },
}
