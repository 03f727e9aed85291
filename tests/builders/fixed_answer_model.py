"""A model folder that gives one answer to everything, in a context as long as agents need.

It is a Llama of one layer without effect: a hidden state is the token itself, and the head chooses
what follows it. So the letters of the answer differ, and a line break begins it.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import mlx.core as mx

from mlx_parallm.tokenizer.vocabulary import gpt2_byte_map
from tests.byte_vocabulary import END, byte_level

ANSWER = "It works."
CONTEXT = 400_000
HEAD_DIM = 16
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] | string }}{% endfor %}"
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ '\\n' }}"
)


def write_fixed_answer_model(folder: Path) -> Path:
    """Write the model, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    content = byte_level()
    size = len(content["model"]["vocab"])
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<end>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(_config(size)))
    mx.save_safetensors(str(folder / "model.safetensors"), _weights(size))
    return folder


def _config(size: int) -> dict[str, object]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": size,
        "hidden_size": size,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": END,
    }


def _weights(size: int) -> dict[str, mx.array]:
    numbers = {byte: 1 + number for number, byte in enumerate(gpt2_byte_map().values())}
    chain = [numbers[byte] for byte in f"\n{ANSWER}".encode()]
    head = mx.zeros((size, size))
    for before, after in pairwise([*chain, END]):
        head[after, before] = 1.0
    layer = {
        "self_attn.q_proj": (HEAD_DIM, size),
        "self_attn.k_proj": (HEAD_DIM, size),
        "self_attn.v_proj": (HEAD_DIM, size),
        "self_attn.o_proj": (size, HEAD_DIM),
        "mlp.gate_proj": (8, size),
        "mlp.up_proj": (8, size),
        "mlp.down_proj": (size, 8),
    }
    prefix = "model.layers.0."
    return {
        "model.embed_tokens.weight": mx.eye(size),
        # A hidden state has one number, which the norm makes the root of the size: 16.
        "lm_head.weight": 4 * head,
        "model.norm.weight": mx.ones(size),
        **{f"{prefix}{name}.weight": mx.zeros(shape) for name, shape in layer.items()},
        f"{prefix}input_layernorm.weight": mx.ones(size),
        f"{prefix}post_attention_layernorm.weight": mx.ones(size),
    }
