"""Models of the golden pipelines as folders on disk, with their tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.encoder_folders import golden_arrays, read_golden, write_encoder
from tests.task_tokenizers import write_tokenizer

PIPELINES = Path(__file__).parent / "golden" / "pipelines.json"


def golden_pipelines() -> list[dict[str, Any]]:
    """What transformers answers; see scripts/golden_pipelines.py."""
    return json.loads(PIPELINES.read_text(encoding="utf-8"))


def write_task_model(folder: Path, encoder: str, changes: dict[str, Any]) -> Path:
    """The model of a pipeline: a golden encoder with changes to its config."""
    golden = read_golden(encoder)
    config = {**golden["config"], **changes}
    write_encoder(folder, config, golden_arrays(golden))
    write_tokenizer(folder, config["model_type"])
    return folder


def assert_alike(found: Any, expected: Any, where: str = "answer") -> None:
    """The same values, but for rounding of the numbers that are no integers."""
    if isinstance(expected, float):
        assert isinstance(found, float), where
        assert abs(found - expected) <= 1e-4, f"{where}: {found} is not {expected}"
    elif isinstance(expected, list):
        assert isinstance(found, list), where
        assert len(found) == len(expected), where
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_alike(one, other, f"{where}.{number}")
    elif isinstance(expected, dict):
        assert set(found) == set(expected), where
        for key, value in expected.items():
            assert_alike(found[key], value, f"{where}.{key}")
    else:
        assert found == expected, f"{where}: {found!r} is not {expected!r}"
