"""A small embedder as a folder of sentence-transformers, with a tokenizer of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.encoder_folders import read_golden, write_golden
from tests.word_tokenizer import word_tokenizer

MAX_LEN = 24


def write_embedder(folder: Path, pooling: str = "mean_tokens", *, normalizes: bool = True) -> Path:
    """BERT of the golden values, whose tokens are words ``w5`` to ``wN``."""
    golden = read_golden("bert")
    write_golden(folder, golden)
    write_words(folder, golden["config"]["vocab_size"])
    steps: list[tuple[str, str]] = [("", "Transformer"), ("1_Pooling", "Pooling")]
    if normalizes:
        steps.append(("2_Normalize", "Normalize"))
    modules: list[dict[str, Any]] = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(steps)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": MAX_LEN}))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    config = {"word_embedding_dimension": 32, f"pooling_mode_{pooling}": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return folder


def write_encoder_of(folder: Path, golden_name: str, **changes: Any) -> Path:
    """Write an encoder of the golden values with such a tokenizer; ``changes`` of its config."""
    golden = read_golden(golden_name)
    golden["config"] |= changes
    write_golden(folder, golden)
    write_words(folder, golden["config"]["vocab_size"])
    return folder


def write_words(folder: Path, vocab_size: int) -> None:
    """Write the tokenizer of words ``w5`` to ``wN``."""
    tokenizer = word_tokenizer(vocab_size)
    # Files often bring these; they must change nothing.
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
