"""Models of the golden pipelines as folders on disk, with their tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.encoder_folders import golden_arrays, read_golden, write_encoder
from tests.task_tokenizers import write_tokenizer

PIPELINES = Path(__file__).parent / "golden" / "pipelines.json"


def golden_pipelines() -> list[dict[str, Any]]:
    """Return the answers of transformers; see scripts/golden_pipelines.py."""
    return json.loads(PIPELINES.read_text(encoding="utf-8"))


def write_task_model(folder: Path, encoder: str, changes: dict[str, Any]) -> Path:
    """Write the model of a pipeline: a golden encoder with changes to its config."""
    golden = read_golden(encoder)
    config = {**golden["config"], **changes}
    write_encoder(folder, config, golden_arrays(golden))
    write_tokenizer(folder, config["model_type"])
    return folder


def assert_alike(actual: Any, expected: Any, where: str = "answer") -> None:
    """Assert that values are equal, floats up to rounding."""
    if isinstance(expected, float):
        assert isinstance(actual, float), where
        assert abs(actual - expected) <= 1e-4, f"{where}: {actual} is not {expected}"
    elif isinstance(expected, list):
        assert isinstance(actual, list), where
        assert len(actual) == len(expected), where
        for number, (part, other) in enumerate(zip(actual, expected, strict=True)):
            assert_alike(part, other, f"{where}.{number}")
    elif isinstance(expected, dict):
        assert set(actual) == set(expected), where
        for key, value in expected.items():
            assert_alike(actual[key], value, f"{where}.{key}")
    else:
        assert actual == expected, f"{where}: {actual!r} is not {expected!r}"
