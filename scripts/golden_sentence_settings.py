"""A writer of folders as sentence-transformers saves them, with vectors of texts.

Run it by hand, in the environment of ``scripts/golden_prompts.py``:

    /tmp/golden/bin/python -m scripts.golden_sentence_settings

A case has the JSON files of a folder in an old form, those that the library made of it when it
saved it, and the vectors that each gives. They may differ: with transformers 5, saving loses
``do_lower_case`` of ``sentence_bert_config.json`` where the tokenizer is BERT's. The weights are
those of ``tests/golden/encoders/bert``.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer  # pyright: ignore[reportMissingImports]

from scripts.golden_encoders import lines
from tests.sentence_settings import SETTINGS_FILE, TEXTS, write_files, write_weights
from tests.task_tokenizers import wordpiece

#: ``POOLINGS``: contents of ``1_Pooling/config.json``.
POOLINGS: dict[str, dict[str, Any]] = {
    "two_poolings": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
    "all_poolings": {
        f"pooling_mode_{name}": True
        for name in (
            *("lasttoken", "weightedmean_tokens", "mean_sqrt_len_tokens", "mean_tokens"),
            *("max_tokens", "cls_token"),
        )
    },
    "listed_poolings": {"pooling_mode": ["mean", "lasttoken", "cls"]},
    "no_pooling": {"pooling_mode_cls_token": False},
}
#: ``LOWER``: contents of ``sentence_bert_config.json`` and further fields of the tokenizer's.
LOWER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cased": ({}, {"do_lower_case": False}),
    "lowered": ({"do_lower_case": True}, {"do_lower_case": False, "strip_accents": False}),
    "accents": ({}, {"do_lower_case": True, "strip_accents": False}),
}
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]


def main() -> None:
    """Write the file."""
    cases = {name: ({}, {}, pooling) for name, pooling in POOLINGS.items()}
    mean = {"pooling_mode_mean_tokens": True}
    cases |= {name: (*settings, mean) for name, settings in LOWER.items()}
    values = {name: golden_values(*case) for name, case in cases.items()}
    SETTINGS_FILE.write_text(lines(values), encoding="utf-8")
    print(f"{SETTINGS_FILE}: {SETTINGS_FILE.stat().st_size} bytes")


def reloaded(folder: Path) -> Any:
    """Return the model in a folder."""
    return SentenceTransformer(str(folder), device="cpu")


def vectors_of(model: Any) -> list[list[float]]:
    """Return the rounded vectors of the texts."""
    return [[round(float(value), 6) for value in row] for row in model.encode(TEXTS)]


def golden_values(
    own: dict[str, Any], tokenizer: dict[str, Any], pooling: dict[str, Any]
) -> dict[str, Any]:
    """Return the files of both forms, and the vectors."""
    _, names = wordpiece()
    files = {
        "modules.json": MODULES,
        "sentence_bert_config.json": {"max_seq_length": 16, **own},
        "tokenizer_config.json": {"tokenizer_class": "BertTokenizer", **names, **tokenizer},
        "1_Pooling/config.json": {"word_embedding_dimension": 32, **pooling},
    }
    with tempfile.TemporaryDirectory() as path:
        old, new = Path(path, "old"), Path(path, "new")
        write_weights(old)
        write_files(old, files)
        model = reloaded(old)
        model.save_pretrained(str(new), create_model_card=False)
        vectors = {"old": vectors_of(model), "new": vectors_of(reloaded(new))}
        saved = {
            str(file.relative_to(new)): json.loads(file.read_text(encoding="utf-8"))
            for file in sorted(new.rglob("*.json"))
            if file != new / "config.json" and (own or file.name != "tokenizer.json")
        }
    return {"old": files, "new": saved, "vectors": vectors}


if __name__ == "__main__":
    main()
