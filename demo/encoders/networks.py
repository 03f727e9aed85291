"""The shapes of the encoders, fresh weights, and storage as folders of Hugging Face's form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from demo.encoders.tokenizers import CLS_ID, MASK_ID, PAD_ID, SEP_ID
from mlx_parallm.models.loading import ARCHITECTURES

MAX_LENGTH = 128


def bert_config(
    vocab_size: int, *, dims: int, layers: int, architecture: str, **more: object
) -> dict[str, Any]:
    """Return the ``config.json`` of a BERT."""
    return {
        "architectures": [architecture],
        "model_type": "bert",
        "vocab_size": vocab_size,
        "hidden_size": dims,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 4 * dims,
        "hidden_act": "relu",
        "max_position_embeddings": MAX_LENGTH,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": 0.02,
        "pad_token_id": PAD_ID,
        "torch_dtype": "float16",
        **more,
    }


def modernbert_config(
    vocab_size: int, *, dims: int, layers: int, architecture: str, **more: object
) -> dict[str, Any]:
    """Return the ``config.json`` of a ModernBERT whose layers all have global attention."""
    return {
        "architectures": [architecture],
        "model_type": "modernbert",
        "vocab_size": vocab_size,
        "hidden_size": dims,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 2 * dims,
        "hidden_activation": "relu",
        "classifier_activation": "relu",
        "max_position_embeddings": MAX_LENGTH,
        "global_attn_every_n_layers": 1,
        "layer_types": ["full_attention"] * layers,
        "global_rope_theta": 10000.0,
        "norm_eps": 1e-5,
        "pad_token_id": PAD_ID,
        # Without these ids transformers uses those of ModernBERT's own vocabulary.
        "bos_token_id": CLS_ID,
        "eos_token_id": SEP_ID,
        "cls_token_id": CLS_ID,
        "sep_token_id": SEP_ID,
        "mask_token_id": MASK_ID,
        "torch_dtype": "float16",
        **more,
    }


def new_model(config: dict[str, Any], seed: int) -> Any:
    """Return a ``Model`` of ``mlx_parallm.models`` with fresh float32 weights."""
    mx.random.seed(seed)
    module = ARCHITECTURES[config["model_type"]]
    model = module.Model(module.ModelArgs.from_dict({**config, "add_pooling_layer": False}))
    mx.eval(model.parameters())
    return model


def named_weights(model: nn.Module) -> dict[str, mx.array]:
    """Return the weights by their dotted names."""
    return dict(cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters())))


def save(model: nn.Module, config: dict[str, Any], folder: Path) -> None:
    """Write ``config.json`` and the weights in float16; a bare BERT is stored without prefix."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: array.astype(mx.float16) for name, array in named_weights(model).items()}
    if config["architectures"] == ["BertModel"]:
        weights = {name.removeprefix("bert."): array for name, array in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def save_sentence_transformers(folder: Path, dims: int) -> None:
    """Write the files by which sentence-transformers knows an embedder: mean pooling, length 1."""
    steps = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(steps)
    ]
    pooling = {"word_embedding_dimension": dims, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("modules.json", modules),
        ("1_Pooling/config.json", pooling),
        ("sentence_bert_config.json", {"max_seq_length": MAX_LENGTH, "do_lower_case": False}),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
