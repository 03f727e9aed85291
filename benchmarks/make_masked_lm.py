"""Make a masked LM of RoBERTa-base's shape, with random weights, as Hugging Face has it.

Run ``python -m benchmarks.make_masked_lm FOLDER``. Equal seeds give equal files. Its tokens
are RoBERTa's kind, byte-level pairs, but of made-up words: each word after a space is one token.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from benchmarks.make_model import LEXICON_SEED, LEXICON_SIZE
from mlx_parallm.bench.workload import make_lexicon
from mlx_parallm.models import roberta

MASKED_LM_FOLDER = Path("results/masked_lm")
SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
MASK = "<mask>"
#: ``NUM_AROUND``: number of special tokens around a text.
NUM_AROUND = 2
CONFIG: dict[str, Any] = {
    "model_type": "roberta",
    "architectures": ["RobertaForMaskedLM"],
    "vocab_size": 50265,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
WEIGHT_SCALE = 0.02


def make_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer of exactly the config's size."""
    tokens = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    known, merges = set(tokens), []
    for word in make_lexicon(LEXICON_SIZE, LEXICON_SEED):
        left = "\u0120"
        for letter in word:
            if left + letter not in known:
                known.add(left + letter)
                tokens.append(left + letter)
                merges.append((left, letter))
            left += letter
    tokens += [f"<unused{number}>" for number in range(CONFIG["vocab_size"] - 1 - len(tokens))]
    vocabulary = {token: number for number, token in enumerate([*tokens, MASK])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.post_processor = processors.RobertaProcessing(  # type: ignore[assignment]
        ("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=False
    )
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.add_special_tokens([AddedToken(MASK, lstrip=True, special=True)])
    return tokenizer


def masked_texts(lengths: list[int], seed: int) -> list[str]:
    """Return texts with one mask each and these numbers of tokens, special ones included."""
    draw = random.Random(seed)
    words = make_lexicon(LEXICON_SIZE, LEXICON_SEED)
    texts = []
    for length in lengths:
        own = draw.choices(words, k=length - NUM_AROUND)
        own[draw.randrange(len(own))] = MASK
        texts.append("".join(f" {word}" for word in own))
    return texts


def make_weights(seed: int, config: dict[str, Any]) -> dict[str, mx.array]:
    """Return float32 weights under the names of Hugging Face's ``RobertaForMaskedLM``."""
    mx.random.seed(seed)
    model = roberta.Model(roberta.ModelArgs.from_dict(config))
    named: Any = tree_flatten(model.parameters())
    weights = {
        name: WEIGHT_SCALE * mx.random.normal(weight.shape) if weight.ndim > 1 else weight
        for name, weight in named
    }
    mx.eval(weights)
    return weights


def make_masked_lm(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write the model to ``folder``, unless it is there already; ``changes`` are of the config."""
    config = CONFIG | changes
    stamp = folder / "seed.txt"
    if stamp.exists() and stamp.read_text() == str(seed):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    kinds = ("bos_token", "pad_token", "eos_token", "unk_token")
    names = dict(zip(kinds, SPECIALS, strict=True))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 512,
        "mask_token": {"__type": "AddedToken", "content": MASK, "lstrip": True},
        **names,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    mx.save_safetensors(
        str(folder / "model.safetensors"), make_weights(seed, config), {"format": "pt"}
    )
    stamp.write_text(str(seed))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the benchmark's masked LM.")
    parser.add_argument("folder", type=Path, nargs="?", default=MASKED_LM_FOLDER)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(make_masked_lm(arguments.folder, arguments.seed))


if __name__ == "__main__":
    main()
