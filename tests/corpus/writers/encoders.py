"""Saves tiny embedders by sentence-transformers, with the vectors that it gives from them.

``python -m tests.corpus.writers.encoders FOLDER`` writes ``FOLDER/index.json`` and the folders that
it names. Vectors are those of the model that is read from the folder again.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers
from sentence_transformers import SentenceTransformer  # pyright: ignore[reportMissingImports]
from sentence_transformers.sentence_transformer import modules  # pyright: ignore[reportMissingImports]

from tests.task_tokenizers import TOKENIZERS

TEXTS = ["the CAT is in Paris", "th\u00e9 cat \u00c9 is", "you and a bird near the river!"]
SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
}
#: Models by their type: the class of the tokenizer, its kind in ``TOKENIZERS``, and the config.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertTokenizer", "bert", SIZES),
    "electra": ("ElectraTokenizer", "bert", {**SIZES, "embedding_size": 16}),
    "distilbert": (
        "DistilBertTokenizer",
        "bert",
        {"vocab_size": 99, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    ),
    "roberta": ("PreTrainedTokenizerFast", "roberta", {**SIZES, "type_vocab_size": 1}),
    "xlm-roberta": ("PreTrainedTokenizerFast", "xlm-roberta", {**SIZES, "type_vocab_size": 1}),
    "modernbert": ("PreTrainedTokenizerFast", "modernbert", {**SIZES, "pad_token_id": 1}),
}
#: Fields of ``tokenizer_config.json``.
TOKENIZER_FIELDS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "cased": {"do_lower_case": False},
    "accents": {"do_lower_case": True, "strip_accents": False},
}
#: Arguments of modules after the transformer.
PARTS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "mean": [("Pooling", {"pooling_mode": "mean"})],
    "cls": [("Pooling", {"pooling_mode": "cls"}), ("Normalize", {})],
    "several poolings": [
        ("Pooling", {"pooling_mode": ("lasttoken", "mean_sqrt_len_tokens", "max", "weightedmean")})
    ],
    "dense": [
        ("Pooling", {"pooling_mode": "mean"}),
        ("Dense", {"in_features": 32, "out_features": 8}),
    ],
}
LOWERED = {"max_seq_length": 16, "do_lower_case": True}


def write_transformer(folder: Path, model_type: str, fields: dict[str, Any]) -> None:
    """Save a transformer and its tokenizer."""
    class_name, kind, sizes = MODELS[model_type]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    model = transformers.AutoModel.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(str(folder))
    tokenizer, names = TOKENIZERS[kind]()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": class_name, "model_max_length": 36, **names, **fields}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def write_embedder(
    folder: Path, transformer: Path, parts: list[tuple[str, dict[str, Any]]], **settings: Any
) -> None:
    """Save an embedder with these modules behind a transformer."""
    own = modules.Transformer(str(transformer), **settings)
    size = own.get_embedding_dimension()
    made = [
        getattr(modules, kind)(
            **({"embedding_dimension": size} if kind == "Pooling" else {}), **more
        )
        for kind, more in parts
    ]
    torch.manual_seed(1)
    SentenceTransformer(modules=[own, *made], device="cpu").save_pretrained(
        str(folder), create_model_card=False
    )


def main(folder: Path) -> None:
    """Write everything."""
    index: list[dict[str, Any]] = []
    for model_type, (name, fields) in itertools.product(MODELS, TOKENIZER_FIELDS.items()):
        transformer = folder / f"{model_type} {name}"
        write_transformer(transformer, model_type, fields)
        cases = {f"{name}, {part}": (parts, {}) for part, parts in PARTS.items()}
        cases[f"{name}, lowered"] = (PARTS["mean"], LOWERED)
        for case, (parts, settings) in cases.items():
            target = folder / f"{model_type} {case}"
            write_embedder(target, transformer, parts, **settings)
            vectors = SentenceTransformer(str(target), device="cpu").encode(TEXTS)
            line = {"model": model_type, "case": case, "folder": target.name}
            index.append(line | {"vectors": vectors.tolist()})
    written = {"texts": TEXTS, "embedders": index}
    (folder / "index.json").write_text(json.dumps(written), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
