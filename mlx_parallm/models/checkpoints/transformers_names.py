"""The paths that linear layers have in transformers' classes, by their paths here.

Adapters are read under transformers' names by the ends of their paths
(``worker/lora/adapted_layers.py``); to write them, the whole paths are needed. Most paths are the
same in both. ``tests/golden/module_names.json`` has transformers' own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_parallm.models.checkpoints.decoders import architecture

Rules = Sequence[tuple[str, str]]

LANGUAGE = r"^language_model\."
#: ``WRAPPED``: model types whose text model is a part of a model that takes images, and the name
#: of that part.
WRAPPED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("gemma3", "gemma3n", "gemma4", "internvl", "kimi_k25", "llava", "llava_next"),
            *("minimax_m3_vl", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe"),
            *("qwen3_vl", "qwen3_vl_moe"),
        ),
        "language_model",
    ),
    "idefics3": "text_model",
    "smolvlm": "text_model",
}
#: ``RULES``: what is replaced in the paths of a model type, in this order.
RULES: Mapping[str, Rules] = {
    "gpt2": ((r"^model\.", "transformer."),),
    "gte": (
        (r"^new\.encoder\.layer\.", "gte.layers."),
        (r"^new\.", "gte."),
        (r"\.attention\.", ".self_attn."),
    ),
    "gpt_neox": ((r"^model\.embed_out$", "lm_head"), (r"^model\.h\.", "gpt_neox.layers.")),
    "gptj": ((r"^model\.", "transformer."),),
    "kimi_linear": ((r"\.(f_[ab]_proj)$", r".forget_gate.\1"),),
    "laguna": ((r"\.shared_expert\.", ".shared_experts."),),
    "lfm2_moe": (
        (r"\.feed_forward\.gate_proj$", ".feed_forward.w1"),
        (r"\.feed_forward\.down_proj$", ".feed_forward.w2"),
        (r"\.feed_forward\.up_proj$", ".feed_forward.w3"),
    ),
    "llama4_text": ((r"^output$", "lm_head"),),
    "muse_glimmer": ((r"^model\.", "model.language_model."),),
    "nanochat": (
        (r"^transformer\.h\.", "model.layers."),
        (r"\.attn\.c_proj$", ".self_attn.o_proj"),
        (r"\.attn\.c_([qkv])$", r".self_attn.\1_proj"),
        (r"\.mlp\.c_fc$", ".mlp.fc1"),
        (r"\.mlp\.c_proj$", ".mlp.fc2"),
    ),
    "nemotron_h": ((r"^backbone\.", "model."),),
    "nomic_bert": (
        (r"^bert\.encoder\.", "nomic_bert."),
        (r"^bert\.", "nomic_bert."),
        (r"\.attn\.out_proj$", ".self_attn.o_proj"),
        (r"\.mlp\.fc11$", ".mlp.up_proj"),
        (r"\.mlp\.fc12$", ".mlp.gate_proj"),
        (r"\.mlp\.fc2$", ".mlp.down_proj"),
    ),
}
# ROUTERS: linear layers that choose experts, which transformers computes otherwise.
ROUTERS = r"\.(mlp|block_sparse_moe|feed_forward)\.(gate|router)(\.proj|\.gate_proj|\.layer)?$"
#: ``OTHERWISE``: layers that transformers' class does not have as linear ones, and the output
#: projections of Mamba, which PEFT refuses because a kernel reads their weights.
OTHERWISE: Mapping[str, str] = {
    "bailing_hybrid": r"\.attention\.",
    "dbrx": r"\.ffn\.",
    **dict.fromkeys(("falcon_h1", "mamba", "mamba2", "nemotron_h"), r"\.out_proj$"),
    "granitemoehybrid": r"\.mlp\.",
    "gte": r"\.(qkv_proj|up_gate_proj)$",
    "minimax_m3_vl": r"\.mlp\.|\.(gate_proj|up_proj)$|\.block_sparse_moe\.|\.index_",
    "muse_spark": r"\.qkvg_proj$",
    "nomic_bert": r"\.Wqkv$",
}
# WITH_ROUTERS: model types whose routers are linear layers in transformers too.
WITH_ROUTERS = frozenset({"llama4", "llama4_text"})


def transformers_path(
    config: Mapping[str, Any], path: str, *, has_head: bool = False
) -> str | None:
    """Return the path that a linear layer has in the class of transformers that a config names.

    Args:
        config: the checkpoint's config.json.
        path: the layer's path in the model here.
        has_head: True for the class of the family that classifies sequences, whatever the config
            names.

    Returns:
        None if the class has no such linear layer.
    """
    model_type, name = str(config.get("model_type")), architecture(config)
    if has_head:
        name = "ForSequenceClassification"
    if "auto_map" in config:
        # The class comes with the checkpoint, and names modules as the checkpoint does.
        return _bare(path, name)
    is_router = model_type not in WITH_ROUTERS and re.search(ROUTERS, path)
    if is_router or re.search(OTHERWISE.get(model_type, "$^"), path):
        return None
    for pattern, replacement in RULES.get(model_type, ()):
        path = re.sub(pattern, replacement, path)
    if model_type in WRAPPED or model_type == "llama4":
        path = _of_wrapped(model_type, name, path)
    return _bare(path, name)


def is_transposed(config: Mapping[str, Any], path: str) -> bool:
    """True if transformers keeps the weight of a linear layer transposed (``Conv1D``)."""
    return config.get("model_type") == "gpt2" and not path.endswith("lm_head")


def _of_wrapped(model_type: str, name: str, path: str) -> str:
    """Return the path of a text model's layer in the whole model, or in the text model alone."""
    if name.endswith("ForCausalLM"):
        return re.sub(LANGUAGE, "", path)
    part = WRAPPED.get(model_type)
    if part is None:
        return path
    return re.sub(
        rf"{LANGUAGE}model\.", f"model.{part}.", re.sub(rf"{LANGUAGE}lm_head$", "lm_head", path)
    )


def _bare(path: str, name: str) -> str:
    """Return a path in a class without a head, which lacks the trunk's name."""
    is_bare = name.endswith("Model") and not name.endswith("LMHeadModel")
    return path.partition(".")[2] if is_bare and path.count(".") > 1 else path
