"""Golden encoder-decoders as folders on disk (scripts/golden_seq2seq_cases.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden" / "seq2seq"


def seq2seq_names() -> list[str]:
    return sorted(file.stem for file in GOLDEN.glob("*.json"))


def read_seq2seq(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
