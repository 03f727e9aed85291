"""Make the benchmark model: a random Qwen3 of 4 layers, 256 wide, with 4,096 tokens.

Run ``python -m benchmarks.make_model FOLDER``. Equal seeds give equal files. The model is
random but for one thing: its end-of-text token and the tokens that are no plain ASCII text have a
logit far below all others, so that every answer runs to ``max_tokens`` and is valid text that any
detokeniser prints alike.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mlx_parallm.bench.workload import make_lexicon
from mlx_parallm.worker.weights.loader import DTYPES

VOCAB_SIZE = 4096
END_TOKEN = "<|endoftext|>"
LEXICON_SIZE = 3000
LEXICON_SEED = 7
MAX_MODEL_LEN = 8192
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": 0,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# BIAS_COLUMN_VALUE: the residual stream's value in the column that the head's first column reads.
BIAS_COLUMN_VALUE = 4.0
FORBIDDEN_WEIGHT = -50.0


def train_tokenizer(seed: int) -> Tokenizer:
    """Train a byte-level BPE of exactly ``VOCAB_SIZE`` tokens on generated words."""
    words = make_lexicon(LEXICON_SIZE, LEXICON_SEED)
    draw = random.Random(seed)
    lines = (" ".join(draw.choices(words, k=40)) for _ in range(4000))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the tokenizer has {tokenizer.get_vocab_size()} tokens")
    return tokenizer


def forbidden_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return the ids a model must not emit: the end, and what is no plain ASCII text alone."""
    end_id = tokenizer.token_to_id(END_TOKEN)
    assert end_id is not None
    forbidden = [end_id]
    for token_id in range(1, VOCAB_SIZE):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        if not (text.isascii() and text.isprintable()):
            forbidden.append(token_id)
    return forbidden


def make_weights(
    seed: int, forbidden: list[int], config: dict[str, Any] = CONFIG
) -> dict[str, mx.array]:
    """Return the weights of a Qwen3, by name, in the config's ``torch_dtype``."""
    mx.random.seed(seed)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    weights = dict(tree_flatten(model.parameters()))
    embedding = mx.random.normal((config["vocab_size"], config["hidden_size"]))
    embedding[:, 0] = BIAS_COLUMN_VALUE
    weights["model.embed_tokens.weight"] = embedding
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0, :] = 0.0
            weights[name] = weight
    head = weights["lm_head.weight"] * 4.0  # [vocab, hidden]
    head[:, 0] = 0.0
    head[mx.array(forbidden), 0] = FORBIDDEN_WEIGHT
    weights["lm_head.weight"] = head
    dtype = DTYPES[config["torch_dtype"]]
    weights = {name: weight.astype(dtype) for name, weight in weights.items()}
    mx.eval(weights)
    return weights


def make_model(folder: Path, seed: int = 0, config: dict[str, Any] = CONFIG) -> Path:
    """Write a model to ``folder`` in mlx_lm's form, unless it is there already.

    ``config`` is that of another Qwen3 with its own head. It has the same tokens, and may have more
    that are never written.
    """
    stamp = folder / "seed.txt"
    if stamp.exists() and stamp.read_text() == str(seed):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(seed)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_TOKEN,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    # A larger vocabulary has tokens that the tokenizer does not know.
    unknown = range(VOCAB_SIZE, config["vocab_size"])
    weights = make_weights(seed, [*forbidden_tokens(tokenizer), *unknown], config)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    stamp.write_text(str(seed))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the benchmark model.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("results/model"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(make_model(arguments.folder, arguments.seed))


if __name__ == "__main__":
    main()
