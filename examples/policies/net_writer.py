"""Write torch modules as the folder of a net. The environment needs torch, but not this package."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
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
        self.weights: dict[str, np.ndarray] = {}
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
            array = tensor.detach().cpu().numpy() if hasattr(tensor, "detach") else tensor
            self.weights[f"{name}.{part}"] = np.ascontiguousarray(array, np.float32)
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
        return self.add(name, kind, source, weights=module.state_dict(), **fields)

    def save(self, folder: Path) -> None:
        """Write the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        # Sizes of torch and SB3 may be NumPy's numbers.
        text = json.dumps(self.config, indent=1, default=lambda number: number.item()) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")
        save_file(self.weights, folder / "model.safetensors")


Fields = dict[str, Any]


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
    if module.padding_mode != "zeros" or isinstance(module.padding, str):
        return None
    names = ("in_channels", "out_channels", "groups")
    pairs = ("kernel_size", "stride", "padding", "dilation")
    return {
        "type": "conv2d",
        **{name: getattr(module, name) for name in names},
        **{name: list(getattr(module, name)) for name in pairs},
        "bias": module.bias is not None,
    }


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
    nn.Embedding: _plain("embedding", "num_embeddings", "embedding_dim"),
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
}
