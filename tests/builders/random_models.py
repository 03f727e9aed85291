"""Random models of well-known shapes: what decodes fast does not depend on the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_parallm.kernels.language import CudaLanguage
from mlx_parallm.worker.device.properties import backend_name
from mlx_parallm.worker.layers.attention_heads import use_head_kernels
from mlx_parallm.worker.layers.block_kernels import BlockKernels, use_block_kernels
from mlx_parallm.worker.layers.delta_net import NetKernels, use_net_kernels
from mlx_parallm.worker.layers.expert_kernel import ExpertKernel, use_expert_layers
from mlx_parallm.worker.layers.fused_blocks import use_fused_blocks
from mlx_parallm.worker.layers.packed import begin_packed_kernels, use_packed_kernels
from mlx_parallm.worker.layers.packed_kernel import PackedKernels
from mlx_parallm.worker.layers.packing import AFFINE
from mlx_parallm.worker.layers.row_kernel import RowKernel
from mlx_parallm.worker.layers.row_layers import use_row_layers
from mlx_parallm.worker.layers.state_kernels import ConvolutionKernel
from mlx_parallm.worker.layers.state_layers import use_state_layers
from mlx_parallm.worker.weights.loader import DTYPES, LoadedModel

COMMON: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "head_dim": 128,
}
QWEN3: dict[str, Any] = COMMON | {"model_type": "qwen3", "num_key_value_heads": 8}
#: Layers of Qwen3-30B-A3B, which has 48; 40 take 51 GB.
MOE: dict[str, Any] = COMMON | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
#: Qwen3.5-9B without its vision part: three gated delta nets, then one full attention.
HYBRID: dict[str, Any] = {
    "model_type": "qwen3_5",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 12288,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rms_norm_eps": 1e-6,
    "vocab_size": 248320,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
#: ``OUTPUTS``: the layers that add to the residual stream.
OUTPUTS = ("o_proj", "out_proj", "down_proj")
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "tie_word_embeddings": False,
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
    "MoE": MOE,
    "hybrid": HYBRID,
    # For a CPU.
    "small": QWEN3
    | TINY
    | {
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 4096,
    },
    "tiny": QWEN3 | TINY,
    "tiny tied": QWEN3 | TINY | {"tie_word_embeddings": True},
    "tiny MoE": MOE
    | TINY
    | {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    "tiny hybrid": HYBRID
    | TINY
    | {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "full_attention_interval": 2,
    },
}


@dataclass(frozen=True, slots=True)
class RandomModel:
    """A model of random weights, evaluated.

    Attributes:
        loaded: as the loader gives it, with the layers as mlx_lm made them.
        table_bytes: the token embedding, where it is not the head too: a step reads few rows of it.
    """

    loaded: LoadedModel
    table_bytes: int

    @property
    def model(self) -> Any:
        """The mlx_lm model."""
        return self.loaded.model

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        return int(self.loaded.config["vocab_size"])


def random_model(
    shape: str, *, bits: int | None = None, mode: str = AFFINE, dtype: mx.Dtype = mx.bfloat16
) -> RandomModel:
    """Return a model of a shape; ``bits`` quantises it in groups of 64, or of 32 in other modes."""
    config = SHAPES[shape]
    mx.random.seed(0)
    model = stock_model(config)
    _cast(model, dtype)
    if bits is not None:
        nn.quantize(model, group_size=64 if mode == AFFINE else 32, bits=bits, mode=mode)
    model.eval()
    sizes = _evaluate(model)
    tables = [size for name, size in sizes.items() if "embed_tokens" in name]
    loaded = LoadedModel(
        model, config, Path(shape), str(dtype).rpartition(".")[2], sum(sizes.values())
    )
    return RandomModel(loaded, 0 if config["tie_word_embeddings"] else sum(tables))


def copying_model(shape: str, successor: mx.array, *, dtype: mx.Dtype = mx.bfloat16) -> RandomModel:
    """Return a Qwen3 or Qwen3.5 that continues each token t with ``successor[t]``, a permutation.

    Its layers compute what those of any model of the shape do and add nothing to the embedding.
    """
    config = SHAPES[shape] | {"tie_word_embeddings": False}
    model = stock_model(config)
    _cast(model, dtype)
    for name, module in model.named_modules():
        if name.endswith(OUTPUTS):
            module.weight = mx.zeros_like(module.weight)
    table = model.model.embed_tokens.weight
    head = mx.zeros_like(table)
    head[successor] = table
    model.lm_head.weight = head
    model.eval()
    sizes = _evaluate(model)
    name = str(dtype).rpartition(".")[2]
    return RandomModel(LoadedModel(model, config, Path(shape), name, sum(sizes.values())), 0)


def flatten(model: RandomModel) -> None:
    """Change layers as the loader does on CUDA."""
    is_cuda = backend_name() == "cuda"
    use_row_layers(model.model, RowKernel(CudaLanguage()) if is_cuda else None)
    if is_cuda:
        packed = PackedKernels(CudaLanguage())
        dtype = DTYPES[model.loaded.dtype]
        begin_packed_kernels(model.model, packed, dtype)
        use_packed_kernels(model.model, packed, dtype)
        use_expert_layers(model.model, ExpertKernel(CudaLanguage()))
        use_state_layers(model.model, ConvolutionKernel(CudaLanguage()))
        use_net_kernels(model.model, NetKernels(CudaLanguage()))
        use_head_kernels(model.model, CudaLanguage())
        use_block_kernels(model.model, BlockKernels(CudaLanguage()))
        use_fused_blocks(model.model)


def stock_model(config: dict[str, Any]) -> Any:
    """Return mlx_lm's model of a configuration; its weights are not evaluated."""
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    if config["model_type"] == "qwen3_5":
        return module.TextModel(module.TextModelArgs.from_dict(config))
    return module.Model(module.ModelArgs.from_dict(config))


def _cast(model: Any, dtype: mx.Dtype) -> None:
    """Cast the weights that a checkpoint of this dtype has in it."""
    keeps: Callable[[str], bool] = getattr(model, "cast_predicate", lambda path: True)
    for name, module in model.named_modules():
        for key, value in module.items():
            if isinstance(value, mx.array) and keeps(f"{name}.{key}"):
                module[key] = value.astype(dtype)


def _evaluate(model: Any) -> dict[str, int]:
    """Make the weights one by one, so that float32 values do not pile up; bytes by name."""
    arrays = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    for _, array in arrays:
        mx.eval(array)
    mx.clear_cache()
    return {name: array.nbytes for name, array in arrays}
