"""Folders of sentence-transformers with settings of tokenizers and poolings.

It needs no MLX, for its golden values come from torch (scripts/golden_sentence_settings.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from tests.golden_weights import golden_weight
from tests.task_tokenizers import wordpiece

GOLDEN = Path(__file__).parent / "golden"
SETTINGS_FILE = GOLDEN / "sentence_settings.json"
TEXTS = ["the CAT is in Paris", "th\u00e9 cat \u00c9 is", "you and a bird near the river!"]


def read_settings() -> dict[str, Any]:
    return json.loads(SETTINGS_FILE.read_text(encoding="utf-8"))


def write_weights(folder: Path) -> Path:
    """Write BERT of the golden values and a tokenizer of words in lower case."""
    folder.mkdir(parents=True, exist_ok=True)
    golden = json.loads((GOLDEN / "encoders" / "bert.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(golden["config"]), encoding="utf-8")
    weights = {name: golden_weight(name, shape) for name, shape in golden["weights"].items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    tokenizer, _ = wordpiece()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_files(folder: Path, files: Mapping[str, Any]) -> Path:
    """Write JSON files by their paths in a folder."""
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content), encoding="utf-8")
    return folder
