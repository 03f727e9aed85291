"""Golden encoders as folders on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests.golden_weights import golden_weight

GOLDEN = Path(__file__).parent / "golden" / "encoders"


def golden_names() -> list[str]:
    return sorted(path.stem for path in GOLDEN.glob("*.json"))


def read_golden(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


def golden_arrays(golden: dict[str, Any]) -> dict[str, mx.array]:
    shapes = golden["weights"]
    return {name: mx.array(golden_weight(name, shape)) for name, shape in shapes.items()}


def write_encoder(folder: Path, config: dict[str, Any], weights: dict[str, mx.array]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    return folder


def write_golden(folder: Path, golden: dict[str, Any]) -> Path:
    return write_encoder(folder, golden["config"], golden_arrays(golden))


def padded(rows: list[list[int]], pad: int) -> mx.array:
    longest = max(len(row) for row in rows)
    return mx.array([row + [pad] * (longest - len(row)) for row in rows], dtype=mx.int32)


def hidden_rows(model: Any, golden: dict[str, Any]) -> list[np.ndarray]:
    """Return the hidden states of each sequence, float32, from one padded batch."""
    hidden, lengths = run_batch(model, golden)
    array = np.array(hidden.astype(mx.float32))
    return [row[:length] for row, length in zip(array, lengths, strict=True)]


def run_batch(model: Any, golden: dict[str, Any]) -> tuple[mx.array, list[int]]:
    """Hidden states of the padded batch, and the lengths of its sequences."""
    ids, types = golden["inputs"]["input_ids"], golden["inputs"]["token_type_ids"]
    lengths = [len(row) for row in ids]
    mask = padded([[1] * length for length in lengths], 0)
    # A padding that is in no config: what padding holds must not matter.
    hidden = model(padded(ids, 3), mask, None if types is None else padded(types, 0))
    return hidden, lengths
