"""A weight that an adapter repeats is the model's, whether that packs its weights or not."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_parallm.adapters.weights import AdapterWeights, LowRank
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.worker.lora.adapted_layers import AdaptedLayers
from mlx_parallm.worker.lora.context import AdapterContext
from tests.host_tensors import host

TABLE = "embed_tokens"
MODES = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}


class Model(nn.Module):
    """An embedding alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(16, 64)


def accepts(model: nn.Module, config: dict[str, Any], copy: mx.array) -> bool:
    """Return whether an adapter that was trained on ``copy`` is accepted."""
    layers = AdaptedLayers(model, mx.float32, AdapterContext(), config=config)
    change = LowRank(kind="embedding", a=host(mx.ones((2, 16))), b=host(mx.ones((64, 2))), scale=1)
    copies = {TABLE: host(copy)}
    adapter = AdapterWeights({TABLE: change}, of_checkpoint=True, copies=copies)
    try:
        layers.of_model(adapter, param="adapter")
    except InvalidRequestError:
        return False
    return True


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("is_unpacked", [False, True])
@pytest.mark.parametrize("is_own", [False, True], ids=["general", "own"])
def test_a_copy_is_the_models_on_every_device(
    mode: str, dtype: mx.Dtype, is_unpacked: bool, is_own: bool
) -> None:
    group_size, bits = MODES[mode]
    packing: dict[str, Any] = {"group_size": group_size, "bits": bits, "mode": mode}
    general = {**packing, "bits": 8} if mode == "affine" else packing
    config = {"quantization": {**general, TABLE: packing} if is_own else packing}
    model = Model()
    weight = mx.random.normal((16, 64)).astype(dtype)
    model.embed_tokens.weight = weight
    nn.quantize(model, **packing)
    if is_unpacked:
        table: Any = model.embed_tokens
        unpacked = mx.dequantize(table.weight, table.scales, table.get("biases"), **packing)
        model.embed_tokens = nn.Embedding(16, 64)
        model.embed_tokens.weight = unpacked.astype(mx.float32)
        assert accepts(model, config, unpacked)
    assert accepts(model, config, weight)
    # Both have the packed numbers of the weight, with other scales.
    for other in (-weight[7:8], 2 * weight[7:8]):
        assert not accepts(model, config, mx.concatenate([weight[:7], other, weight[8:]]))


@pytest.mark.parametrize("quantization", [None, {}, {"bits": 4}, {TABLE: False}])
def test_a_plain_table_has_no_other_form(quantization: Any) -> None:
    model = Model()
    weight = model.embed_tokens.weight
    config = {} if quantization is None else {"quantization": quantization}
    assert accepts(model, config, weight)
    assert not accepts(model, config, weight + 0.1)
