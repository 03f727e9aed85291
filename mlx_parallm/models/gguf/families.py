"""The families of models that GGUF files are read of: their config and the names of their tensors.

llama.cpp's converters change some weights; ``Family`` says which, so that they can be changed back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.models.gguf.fields import Fields, shown
from mlx_parallm.models.gguf.header import TensorInfo
from mlx_parallm.models.gguf.rope import rope_scaling
from mlx_parallm.types.errors import ModelLoadError

Config = dict[str, Any]

#: ``EMBEDDING``, ``HEAD``, ``ROPE_FREQS``: tensors outside of layers.
EMBEDDING = "token_embd.weight"
HEAD = "output.weight"
ROPE_FREQS = "rope_freqs.weight"
GLOBAL_NAMES = {
    EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    HEAD: "lm_head.weight",
}
LAYER = re.compile(r"blk\.(0|[1-9]\d{0,3})\.([\w.]+)", re.ASCII)
MAX_LAYERS = 1024
#: ``MODULES``: of a layer, and by what they are called elsewhere.
MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
POST_NORM = {"ffn_norm": "post_attention_layernorm"}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# GEMMA_BIG: numbers of layers of the two models of 27B, whose queries are scaled by another size
# than that of a head, which no key says.
GEMMA_BIG = {"gemma2": 46, "gemma3": 62}
SLIDING_PATTERN = 6


@dataclass(frozen=True, slots=True)
class Family:
    """Models of one ``general.architecture``.

    Attributes:
        model_type: that of config.json.
        class_name: of transformers.
        modules: of a layer, by their names in files.
        biases: modules that always have a bias.
        is_permuted: True if rows of queries and keys are ordered for llama.cpp's rotation.
        norm_offset: what was added to the weights of norms.
    """

    model_type: str
    class_name: str
    modules: Mapping[str, str]
    biases: tuple[str, ...] = ()
    is_permuted: bool = False
    norm_offset: float = 0.0


GEMMA_OFFSET = 1.0
QKV = ("attn_q", "attn_k", "attn_v")
#: ``FAMILIES``: by ``general.architecture``; Mistral's models are files of ``llama``.
FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM", {**MODULES, **POST_NORM}, is_permuted=True),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", {**MODULES, **POST_NORM}, QKV),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", {**MODULES, **POST_NORM, **HEAD_NORMS}),
    "gemma2": Family(
        "gemma2", "Gemma2ForCausalLM", {**MODULES, **SANDWICH}, norm_offset=GEMMA_OFFSET
    ),
    "gemma3": Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        {**MODULES, **SANDWICH, **HEAD_NORMS},
        norm_offset=GEMMA_OFFSET,
    ),
}


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of a model under the names of its weights.

    Attributes:
        family: of the model.
        config: the fields of its config.json.
        named: the tensors by the names of weights, such as ``model.norm.weight``.
        head_sizes: of weights whose rows are ordered for llama.cpp's rotation, rows of a head.
    """

    family: Family
    config: Config
    named: Mapping[str, TensorInfo]
    head_sizes: Mapping[str, int] = field(default_factory=dict[str, int])


def family_of(fields: Fields) -> Family:
    """Return the family of a file; raise ModelLoadError if it is not served."""
    if fields.architecture not in FAMILIES:
        raise ModelLoadError(
            f"{fields.header.path} is a GGUF file of the architecture "
            f"{shown(fields.architecture)}; served are {', '.join(FAMILIES)}. "
            "A folder in the form of Hugging Face's models may be served (docs/models.md)."
        )
    return FAMILIES[fields.architecture]


def named_tensors(
    fields: Fields, tensors: Mapping[str, TensorInfo], rope_factors: tuple[float, ...] | None
) -> Tensors:
    """Return the tensors of a file, or of all its parts, under the names of weights.

    Args:
        fields: the metadata.
        tensors: by their names in the file.
        rope_factors: the numbers of ``ROPE_FREQS``; None if there is no such tensor.

    Raises:
        ModelLoadError: one is missing, unknown or of another shape than the metadata says.
    """
    family, path = family_of(fields), fields.header.path
    config = _config(fields, family, tensors)
    if rope := rope_scaling(fields, config, rope_factors):
        if fields.architecture == "gemma2":
            raise ModelLoadError(f"{path}: positions of Gemma 2 are not scaled.")
        config["rope_scaling"] = rope
    expected = _shapes(config, family, tensors)
    for name, shape in expected.items():
        if name not in tensors:
            raise ModelLoadError(f"{path} lacks the tensor {name}.")
        if tensors[name].shape != shape:
            raise ModelLoadError(
                f"{path}: tensor {name} has the shape {tensors[name].shape} instead of {shape}."
            )
    if unknown := sorted(tensors.keys() - expected.keys() - {ROPE_FREQS}):
        raise ModelLoadError(
            f"{path} has tensors that {fields.architecture} models do not have: "
            f"{', '.join(map(repr, unknown[:3]))}."
        )
    names = {name: _weight_name(name, family) for name in expected}
    permuted = {
        names[name]: config["head_dim"]
        for name in expected
        if family.is_permuted and (".attn_q." in name or ".attn_k." in name)
    }
    return Tensors(family, config, {names[name]: tensors[name] for name in expected}, permuted)


def _weight_name(name: str, family: Family) -> str:
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    _, layer, module, leaf = name.split(".")
    return f"model.layers.{layer}.{family.modules[module]}.{leaf}"


def _shapes(
    config: Config, family: Family, tensors: Mapping[str, TensorInfo]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that a model has, by their names in files."""
    hidden, heads = config["hidden_size"], config["head_dim"]
    queries, keys = (
        config[name] * heads for name in ("num_attention_heads", "num_key_value_heads")
    )
    wide = config["intermediate_size"]
    linear = {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (wide, hidden),
        "ffn_up": (wide, hidden),
        "ffn_down": (hidden, wide),
    }
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config["vocab_size"], hidden),
        "output_norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes[HEAD] = shapes[EMBEDDING]
    for layer in range(config["num_hidden_layers"]):
        for module in family.modules:
            size = heads if module in HEAD_NORMS else hidden
            shapes[f"blk.{layer}.{module}.weight"] = linear.get(module, (size,))
            bias = f"blk.{layer}.{module}.bias"
            if module in family.biases or (module in linear and bias in tensors):
                shapes[bias] = linear[module][:1]
    return shapes


def _config(fields: Fields, family: Family, tensors: Mapping[str, TensorInfo]) -> Config:
    """Return the fields of config.json without how positions are scaled."""
    layers = fields.size(".block_count")
    if layers > MAX_LAYERS:
        raise fields.wrong(".block_count", f"at most {MAX_LAYERS}")
    if EMBEDDING not in tensors:
        raise ModelLoadError(f"{fields.header.path} lacks the tensor {EMBEDDING}.")
    if fields.has(".expert_count") and fields.header.values[f"{fields.architecture}.expert_count"]:
        raise ModelLoadError(f"{fields.header.path}: mixtures of experts are not read from GGUF.")
    hidden, heads = fields.size(".embedding_length"), fields.size(".attention.head_count")
    head_dim = fields.size(".attention.key_length", hidden // heads or None)
    for key in (".attention.value_length", ".rope.dimension_count"):
        if fields.size(key, head_dim) != head_dim:
            raise fields.wrong(key, f"{head_dim}, the size of a head")
    config: Config = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.size(".attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": fields.size(".feed_forward_length"),
        "rms_norm_eps": fields.real(".attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": fields.size(".context_length"),
        "rope_theta": fields.real(".rope.freq_base", 10000.0),
        "vocab_size": tensors[EMBEDDING].shape[0],
        "tie_word_embeddings": HEAD not in tensors,
    }
    return config | _family_fields(fields, config, tensors)


def _family_fields(fields: Fields, config: Config, tensors: Mapping[str, TensorInfo]) -> Config:
    """Return the fields that only one family has."""
    if fields.architecture == "llama":
        return {
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        }
    if fields.architecture not in GEMMA_BIG:
        return {}
    is_second = fields.architecture == "gemma2"
    is_big = config["num_hidden_layers"] == GEMMA_BIG[fields.architecture]
    size = config["hidden_size"] // config["num_attention_heads"]
    gemma: Config = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": size if is_big else config["head_dim"],
        "sliding_window": fields.size(".attention.sliding_window", 4096 if is_second else None),
    }
    if is_second:
        # The first files of Gemma 2 have neither these keys nor the window.
        caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
        return gemma | {name: fields.real(f".{name}", cap) for name, cap in caps.items()}
    return gemma | {
        "rope_local_base_freq": fields.real(".rope.freq_base_swa", 10000.0),
        "sliding_window_pattern": fields.size(".attention.sliding_window_pattern", SLIDING_PATTERN),
    }
