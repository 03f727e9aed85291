"""Folders of tiny models that ranks can compute together, and adapters of all their layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.adapters.weights import AdapterWeights, Kind, LowRank
from tests.builders.architectures.configs import config_of
from tests.builders.architectures.trial import build


def with_fields(config: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return a configuration with other fields, in its text's configuration too."""
    changed = {**config, **fields}
    return {**changed, "text_config": {**config["text_config"], **fields}}


#: Two layers and four KV heads, so that two and four ranks can share them.
DENSE: dict[str, Any] = {
    **config_of("qwen2"),
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 96,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {
    **DENSE,
    **config_of("qwen3_moe"),
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "vocab_size": 96,
    "mlp_only_layers": [0],
}
#: WIDE_EXPERTS: two ranks share the groups of its quantised layers.
WIDE_EXPERTS = {**EXPERTS, "intermediate_size": 128, "moe_intermediate_size": 64}
#: TIED: its embedding is its head.
TIED: dict[str, Any] = {**DENSE, "tie_word_embeddings": True}
#: HYBRID: gated delta nets beside attention whose only KV head both of two ranks have.
HYBRID = with_fields(config_of("qwen3_5"), num_key_value_heads=1)
#: LATENT: attention over latent keys and values (MLA), and experts.
LATENT = config_of("deepseek_v3")
#: Three ranks share its heads.
THIRDS: dict[str, Any] = {
    **DENSE,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}
GROUP_SIZE = 32


def write_model(
    folder: Path,
    config: dict[str, Any],
    *,
    bits: int | None = None,
    mode: str = "affine",
    seed: int = 0,
) -> Path:
    """Write a model with random float32 weights, or quantised ones, as mlx_lm does."""
    folder.mkdir(parents=True)
    model = build(config)
    if seed:
        source = mx.random.key(seed)
        model.apply(lambda array: array + 0.02 * mx.random.normal(array.shape, key=source))
    if bits is not None:
        nn.quantize(model, group_size=GROUP_SIZE, bits=bits, mode=mode)
        quantization = {"group_size": GROUP_SIZE, "bits": bits, "mode": mode}
        config = {**config, "quantization": quantization}
    weights: Any = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_unreadable(folder: Path, config: dict[str, Any]) -> Path:
    """Write a model whose weights are all NaN, so that reading them fails otherwise."""
    folder.mkdir()
    parameters: Any = tree_flatten(build(config).parameters())
    weights = {name: mx.full(array.shape, mx.nan) for name, array in parameters}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the unpacked weights of a folder's layers, by path."""
    arrays: Any = mx.load(str(folder / "model.safetensors"))
    shapes: dict[str, tuple[int, ...]] = {}
    for name, array in arrays.items():
        path, _, leaf = name.rpartition(".")
        if leaf == "weight" and array.ndim > 1:
            scales = arrays.get(f"{path}.scales")
            inner = array.shape[-1] if scales is None else scales.shape[-1] * GROUP_SIZE
            shapes[path] = (*array.shape[:-1], inner)
    return shapes


def make_adapter(
    folder: Path, seed: int, rank: int, *, is_dora: bool = False, share: int = 1
) -> AdapterWeights:
    """Return an adapter of all layers of a model, its embedding and its head.

    With ``share``, it has as many outputs as a layer has that is cut into so many parts.
    """
    source = np.random.default_rng(seed)
    modules: dict[str, LowRank] = {}

    def factor(*shape: int) -> HostTensor:
        return HostTensor((source.standard_normal(shape) * 0.1).astype(np.float32))

    for path, shape in shapes_of(folder).items():
        if "norm" in path or path.endswith(".gate"):
            continue
        *outer, out, inner = shape
        out //= share
        kind: Kind = "experts" if outer else "linear"
        a, b = factor(*outer, rank, inner), factor(*outer, out, rank)
        if "embed_tokens" in path:
            kind, a, b = "embedding", factor(rank, out), factor(inner, rank)
        magnitude = None
        if is_dora and kind != "experts":
            magnitude = HostTensor((1 + source.random(out)).astype(np.float32))
        modules[path] = LowRank(kind=kind, a=a, b=b, scale=2.0, magnitude=magnitude)
    return AdapterWeights(modules)
