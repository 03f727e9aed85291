"""Random models of well-known shapes: what decodes fast does not depend on the weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3

from mlx_parallm.attention.kernels.dialect import CudaDialect
from mlx_parallm.runner.device import backend_name
from mlx_parallm.runner.loader import LoadedModel
from mlx_parallm.runner.row_kernel import RowKernel
from mlx_parallm.runner.row_layers import use_row_layers

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": QWEN3
    | {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "8B": QWEN3
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "tiny": QWEN3
    | {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 512,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True, slots=True)
class RandomModel:
    """A model of random weights, evaluated; ``stock`` has the layers as mlx_lm made them."""

    loaded: LoadedModel

    @property
    def model(self) -> Any:
        """The mlx_lm model."""
        return self.loaded.model

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        return int(self.loaded.config["vocab_size"])


def random_model(shape: str, *, bits: int | None = None) -> RandomModel:
    """A bfloat16 Qwen3 of a shape; ``bits`` quantises it in groups of 64."""
    config = SHAPES[shape]
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    if bits is not None:
        nn.quantize(model, group_size=64, bits=bits)
    model.eval()
    mx.eval(model.parameters())
    arrays = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    size = sum(array.nbytes for _, array in arrays)
    return RandomModel(LoadedModel(model, config, Path(shape), "bfloat16", size))


def flatten(model: RandomModel) -> None:
    """What the loader does to linear layers on CUDA; after the stock model was measured."""
    kernel = RowKernel(CudaDialect()) if backend_name() == "cuda" else None
    use_row_layers(model.model, kernel)
