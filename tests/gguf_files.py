"""GGUF files of random models, written by the ``gguf`` package as llama.cpp's converters do it.

The names of tensors come from that package, and what the converters change is written here again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import gguf
import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType as Kind
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from mlx_parallm.demo_models.folders import DEMO_FOLDER

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDE, LAYERS, VOCAB = 64, 4, 2, 16, 96, 3, 320
#: ``ARCHITECTURES``: by families of config.json.
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
FLOATS = (Kind.F32, Kind.F16, Kind.BF16)
PACKED = (Kind.Q8_0, Kind.Q4_0, Kind.Q4_1)
ROTATED = (["attn_q"], ["attn_k"])
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


@dataclass
class RandomModel:
    """A config and its weights in float32, by the names of transformers."""

    config: dict[str, Any]
    weights: dict[str, np.ndarray]

    @property
    def architecture(self) -> gguf.MODEL_ARCH:
        return ARCHITECTURES[self.config["model_type"]]


def random_model(model_type: str, *, seed: int = 0, **fields: Any) -> RandomModel:
    config = {
        "model_type": model_type,
        "architectures": [CLASSES[model_type]],
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": WIDE,
        "rms_norm_eps": 1e-4,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
    }
    if model_type.startswith("gemma"):
        config |= {"query_pre_attn_scalar": HEAD_DIM, "tie_word_embeddings": True}
        config |= {"sliding_window": 32, "hidden_activation": "gelu_pytorch_tanh"}
    if model_type == "gemma2":
        config |= {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 12.0}
    if model_type == "gemma3_text":
        config |= {"rope_theta": 1e6, "rope_local_base_freq": 5e3, "sliding_window_pattern": 2}
    config |= fields
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    if config["tie_word_embeddings"] and "lm_head" in model:
        model.pop("lm_head")
    rng = np.random.default_rng(seed)
    weights = {
        name: (rng.standard_normal(array.shape) * 0.2).astype(np.float32)
        for name, array in cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    }
    return RandomModel(config, weights)


def write_folder(folder: Path, model: RandomModel, dtype: mx.Dtype = mx.float32) -> Path:
    """Write a model as a folder, without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config))
    arrays = {name: mx.array(array).astype(dtype) for name, array in model.weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    return folder


def tensors_of(
    model: RandomModel, kind: Kind, kinds: Mapping[str, Kind] | None = None
) -> dict[str, tuple[np.ndarray, Kind]]:
    """Return the tensors of a file: their bytes and types by their names there."""
    config = model.config
    names = gguf.get_tensor_name_map(model.architecture, config["num_hidden_layers"])
    tensors: dict[str, tuple[np.ndarray, Kind]] = {}
    for weight, own in model.weights.items():
        name = names.get_name(weight, try_suffixes=(".weight", ".bias"))
        assert name is not None, weight
        array, of_type = own, Kind.F32 if own.ndim == 1 else (kinds or {}).get(name, kind)
        if model.architecture == gguf.MODEL_ARCH.LLAMA and (
            ".attn_q." in name or ".attn_k." in name
        ):
            array = permuted(array, config["head_dim"])
        if config["model_type"].startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        tensors[name] = (gguf.quantize(array, of_type), of_type)
    return tensors


def permuted(array: np.ndarray, head_dim: int) -> np.ndarray:
    """Return rows as llama.cpp's converter of Llama orders them."""
    heads = array.reshape(-1, 2, head_dim // 2, *array.shape[1:])
    return heads.swapaxes(1, 2).reshape(array.shape)


def dequantised(model: RandomModel, kind: Kind) -> RandomModel:
    """Return a model with the numbers that a file of a type has."""
    weights = {
        name: gguf.dequantize(gguf.quantize(array, kind), kind) if array.ndim > 1 else array
        for name, array in model.weights.items()
    }
    return RandomModel(model.config, {name: np.asarray(each) for name, each in weights.items()})


def add_fields(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """Write the metadata of a model, as the converters do."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
    if "attn_logit_softcapping" in config:
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if "rope_local_base_freq" in config:
        arch = ARCHITECTURES[config["model_type"]]
        key = gguf.Keys.Rope.FREQ_BASE_SWA.format(arch=gguf.MODEL_ARCH_NAMES[arch])
        writer.add_float32(key, config["rope_local_base_freq"])
    if "sliding_window_pattern" in config:
        writer.add_sliding_window_pattern(config["sliding_window_pattern"])


def add_words(writer: gguf.GGUFWriter, count: int = VOCAB) -> None:
    """Write a vocabulary of the bytes, a merge, and tokens that fill it."""
    alphabet = list(gguf.vocab.bytes_to_unicode().values())
    filling = [f"[PAD{number}]" for number in range(count - len(alphabet) - 3)]
    tokens = [*alphabet, "th", *filling, "<|endoftext|>", "<|im_end|>"]
    types = [gguf.TokenType.NORMAL] * (len(alphabet) + 1) + [gguf.TokenType.UNUSED] * len(filling)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([*types, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(count - 1)


def write_gguf(
    path: Path,
    model: RandomModel,
    kind: Kind,
    *,
    kinds: Mapping[str, Kind] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    fields: Mapping[str, Any] | None = None,
    replaced: Mapping[str, tuple[np.ndarray, Kind]] | None = None,
    max_tensors: int = 0,
) -> Path:
    """Write a model as a file; ``max_tensors`` splits it."""
    arch = gguf.MODEL_ARCH_NAMES[model.architecture]
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=max_tensors)
    add_fields(writer, model.config)
    add_words(writer, model.config["vocab_size"])
    for key, value in (fields or {}).items():
        add_value(writer, key.replace("ARCH", arch), value)
    tensors = tensors_of(model, kind, kinds) | dict(replaced or {})
    for name, (data, of_type) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=of_type)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    finish(writer)
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        assert isinstance(value, Sequence)
        writer.add_array(key, value)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_chat(path: Path) -> Path:
    """Write the model of the package that chats, in float32, with its whole tokenizer.json."""
    config = json.loads((DEMO_FOLDER / "config.json").read_text())
    arrays = mx.load(str(DEMO_FOLDER / "model.safetensors"))
    assert isinstance(arrays, dict)
    weights: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        scales = name.replace(".weight", ".scales")
        if scales in arrays and name.endswith(".weight"):
            biases = arrays[name.replace(".weight", ".biases")]
            array = mx.dequantize(array, arrays[scales], biases, group_size=64, bits=8)
        if name.endswith((".weight", ".bias")):
            weights[name] = np.array(array.astype(mx.float32))
    model = RandomModel(config, weights)
    texts = json.loads((DEMO_FOLDER / "tokenizer_config.json").read_text())
    tokenizer = (DEMO_FOLDER / "tokenizer.json").read_text(encoding="utf-8")
    writer = gguf.GGUFWriter(path, "qwen3")
    add_fields(writer, config)
    writer.add_token_list(words_of(json.loads(tokenizer), config["vocab_size"]))
    writer.add_string("tokenizer.huggingface.json", tokenizer)
    writer.add_chat_template(texts["chat_template"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    for name, (data, of_type) in tensors_of(model, Kind.F32).items():
        writer.add_tensor(name, data, raw_dtype=of_type)
    finish(writer)
    return path


def words_of(tokenizer: Mapping[str, Any], count: int) -> list[str]:
    """Return the tokens of a tokenizer.json by their ids, with others between."""
    words = {number: word for word, number in tokenizer["model"]["vocab"].items()}
    words |= {each["id"]: each["content"] for each in tokenizer["added_tokens"]}
    return [words.get(number, f"[PAD{number}]") for number in range(count)]
