"""Make an embedder of all-MiniLM-L6-v2's shape, with random weights, for sentence-transformers.

Run ``python -m benchmarks.make_embedder FOLDER``. Equal seeds give equal files. Its tokens
are BERT's kind, word pieces, but of made-up words: each word of a text is one token.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from benchmarks.make_model import LEXICON_SEED, LEXICON_SIZE
from mlx_parallm.bench.workload import make_lexicon
from mlx_parallm.models import bert

EMBEDDER_FOLDER = Path("results/embedder")
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
#: ``NUM_AROUND``: number of special tokens around a text.
NUM_AROUND = 2
MAX_MODEL_LEN = 512
CONFIG: dict[str, Any] = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "vocab_size": 30522,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "hidden_act": "gelu",
    "max_position_embeddings": MAX_MODEL_LEN,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}
# WEIGHT_SCALE: the standard deviation of BERT's initialisation.
WEIGHT_SCALE = 0.02


def make_tokenizer() -> Tokenizer:
    """Return a WordPiece tokenizer of exactly the config's size, padded with unused words."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    known = [*SPECIALS, *letters, *(f"##{letter}" for letter in letters)]
    pieces = list(dict.fromkeys(known + make_lexicon(LEXICON_SIZE, LEXICON_SEED)))
    pieces += [f"[unused{number}]" for number in range(CONFIG["vocab_size"] - len(pieces))]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
    tokenizer.decoder = decoders.WordPiece()  # type: ignore[assignment]
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")],
    )
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def texts_of_lengths(lengths: list[int], seed: int) -> list[str]:
    """Texts that have these numbers of tokens, special ones included."""
    draw = random.Random(seed)
    words = make_lexicon(LEXICON_SIZE, LEXICON_SEED)
    return [" ".join(draw.choices(words, k=length - NUM_AROUND)) for length in lengths]


def make_weights(seed: int) -> dict[str, mx.array]:
    """Return float32 weights under the names of Hugging Face's ``BertModel``."""
    mx.random.seed(seed)
    model = bert.Model(bert.ModelArgs.from_dict(CONFIG))
    named: Any = tree_flatten(model.parameters())
    weights = {}
    for name, weight in named:
        is_matrix = weight.ndim > 1
        random_weight = WEIGHT_SCALE * mx.random.normal(weight.shape)
        weights[name.removeprefix("bert.")] = random_weight if is_matrix else weight
    mx.eval(weights)
    return weights


def make_embedder(folder: Path, seed: int = 0) -> Path:
    """Write the model to ``folder``, unless it is there already."""
    stamp = folder / "seed.txt"
    if stamp.exists() and stamp.read_text() == str(seed):
        return folder
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    steps = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    contents = {
        "config.json": CONFIG,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": MAX_MODEL_LEN,
            **{f"{token.strip('[]').lower()}_token": token for token in SPECIALS},
        },
        "modules.json": [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(steps)
        ],
        "sentence_bert_config.json": {"max_seq_length": MAX_MODEL_LEN, "do_lower_case": False},
        "1_Pooling/config.json": {
            "word_embedding_dimension": CONFIG["hidden_size"],
            "pooling_mode_mean_tokens": True,
        },
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=2))
    mx.save_safetensors(str(folder / "model.safetensors"), make_weights(seed), {"format": "pt"})
    stamp.write_text(str(seed))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the benchmark's embedder.")
    parser.add_argument("folder", type=Path, nargs="?", default=EMBEDDER_FOLDER)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(make_embedder(arguments.folder, arguments.seed))


if __name__ == "__main__":
    main()
