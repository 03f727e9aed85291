"""The golden cross-encoder as a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.encoder_folders import GOLDEN, write_golden
from tests.word_tokenizer import word_tokenizer


def read_cross_encoder() -> dict[str, Any]:
    return json.loads((GOLDEN.parent / "cross_encoder.json").read_text(encoding="utf-8"))


def write_cross_encoder(folder: Path, **config: Any) -> Path:
    """Its folder; ``config`` has further keys of ``config.json``."""
    golden = read_cross_encoder()
    write_golden(folder, {**golden, "config": {**golden["config"], **config}})
    word_tokenizer(golden["config"]["vocab_size"]).save(str(folder / "tokenizer.json"))
    return folder
