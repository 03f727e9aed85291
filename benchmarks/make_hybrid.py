"""Make a model of Qwen3.5's shape: four layers, of which three are gated delta nets.

Run ``python -m benchmarks.make_hybrid FOLDER``. Its weights are random, as those of
``benchmarks.make_model`` are, or with ``--copies`` such that each token is followed by its
successor in a fixed order, whatever was before. Either way no answer ends before ``max_tokens``.
Its chat template is in the form of Qwen's without thinking: what it puts before an answer is not
in the next turn's prompt.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_5
from tokenizers import AddedToken, Tokenizer

from benchmarks.make_model import END_TOKEN, VOCAB_SIZE, forbidden_tokens, train_tokenizer

SPECIALS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB_SIZE + len(SPECIALS),
    "max_position_embeddings": 16384,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": 0,
}
# BIAS: of the residual stream's first column, which all layers leave as it is.
BIAS = 4.0
# FORBIDDEN: what the head's first column has for tokens that no answer may have.
FORBIDDEN = -50.0
# OUTPUTS: the layers that add to the residual stream.
OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight")


def make_hybrid(folder: Path, *, copies: bool = False) -> Path:
    """Write the model to ``folder``, unless one is there already; return the folder."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(0)
    forbidden = forbidden_tokens(tokenizer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_TOKEN,
        "chat_template": TEMPLATE,
        "model_max_length": CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    forbidden += range(VOCAB_SIZE, CONFIG["vocab_size"])
    weights = _copying_weights(successors(tokenizer)) if copies else _random_weights(forbidden)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    return folder


def successors(tokenizer: Tokenizer) -> dict[int, int]:
    """Return which token of plain text follows each of them in the copying model's order."""
    order = sorted(set(range(VOCAB_SIZE)) - set(forbidden_tokens(tokenizer)))
    random.Random(0).shuffle(order)
    return dict(zip(order, order[1:] + order[:1], strict=True))


def state_bytes() -> int:
    """Return the bytes of a sequence's state in all layers, in float32."""
    heads, size = CONFIG["linear_num_value_heads"], CONFIG["linear_value_head_dim"]
    keys = CONFIG["linear_num_key_heads"] * CONFIG["linear_key_head_dim"]
    matrix = heads * size * CONFIG["linear_key_head_dim"]
    inputs = (CONFIG["linear_conv_kernel_dim"] - 1) * (2 * keys + heads * size)
    num_nets = CONFIG["num_hidden_layers"] - 1
    return 4 * num_nets * (matrix + inputs)


def _stock_weights() -> dict[str, mx.array]:
    """Return random weights, by the names of mlx_lm's model."""
    mx.random.seed(0)
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(CONFIG))
    return dict(tree_flatten(model.parameters()))


def _random_weights(forbidden: list[int]) -> dict[str, mx.array]:
    """Return weights that give the forbidden tokens the lowest logits."""
    weights = _stock_weights()
    table = mx.random.normal((CONFIG["vocab_size"], CONFIG["hidden_size"]))
    table[:, 0] = BIAS
    weights[_only(weights, "embed_tokens.weight")] = table
    for name in filter(lambda name: name.endswith(OUTPUTS), list(weights)):
        weights[name][0, :] = 0.0
    head = weights[_only(weights, "lm_head.weight")] * 4.0  # [vocab, hidden]
    head[:, 0] = 0.0
    head[mx.array(forbidden), 0] = FORBIDDEN
    weights[_only(weights, "lm_head.weight")] = head
    return weights


def _copying_weights(successor: Mapping[int, int]) -> dict[str, mx.array]:
    """Return weights whose layers add nothing, and whose head reads the next token's embedding."""
    weights = _stock_weights()
    for name in filter(lambda name: name.endswith(OUTPUTS), list(weights)):
        weights[name] = mx.zeros_like(weights[name])
    table = mx.random.normal((CONFIG["vocab_size"], CONFIG["hidden_size"]))
    head = mx.zeros_like(table)
    head[mx.array(list(successor.values()))] = table[mx.array(list(successor))]
    weights[_only(weights, "embed_tokens.weight")] = table
    weights[_only(weights, "lm_head.weight")] = head
    return weights


def _only(weights: dict[str, mx.array], ending: str) -> str:
    """Return the one name with this ending."""
    (name,) = (name for name in weights if name.endswith(ending))
    return name


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a small model of Qwen3.5's shape.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("results/hybrid"))
    parser.add_argument("--copies", action="store_true")
    arguments = parser.parse_args()
    print(make_hybrid(arguments.folder, copies=arguments.copies))


if __name__ == "__main__":
    main()
