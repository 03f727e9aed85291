"""Which modules of mlx_lm's models take an adapter."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import mlx.nn as nn
import mlx_lm.models
import pytest
from mlx_lm.models.afm7 import FusedLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlx_parallm.worker.lora.adapted_modules import kind_of

ADAPTED = (
    nn.Linear,
    nn.QuantizedLinear,
    nn.Embedding,
    nn.QuantizedEmbedding,
    SwitchLinear,
    QuantizedSwitchLinear,
)


def _own_layers() -> list[tuple[str, Any]]:
    """Return classes of layers that are called otherwise than those that adapters change."""
    names = [module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)]
    # That of OLMo needs a package that is not installed.
    modules = [importlib.import_module(f"mlx_lm.models.{n}") for n in names if n != "olmo"]
    return [
        (f"{module.__name__}.{name}", each)
        for module in modules
        for name, each in inspect.getmembers(module, inspect.isclass)
        if issubclass(each, ADAPTED) and each not in ADAPTED and "__call__" in vars(each)
    ]


def test_layers_that_return_several_arrays_take_no_adapter() -> None:
    layer = FusedLinear(64, [64, 64])
    assert isinstance(layer(nn.Linear(64, 64).weight), list)
    for each in (layer, layer.to_quantized()):
        assert kind_of(each) is None
    assert kind_of(nn.Linear(64, 64)) == "linear"


@pytest.mark.slow
def test_no_other_layer_of_a_model_is_called_otherwise() -> None:
    known = {"mlx_lm.models.afm7.FusedLinear", "mlx_lm.models.afm7.FusedQuantizedLinear"}
    assert {name for name, _ in _own_layers()} == known
