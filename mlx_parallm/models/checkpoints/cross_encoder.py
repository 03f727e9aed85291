"""A reader of sentence-transformers' settings for cross-encoders.

See https://sbert.net/docs/package_reference/cross_encoder/cross_encoder.html. Versions
of the library store the function applied to a pair's logit in three different places.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.types.json_values import is_object


def scores_are_logits(folder: Path) -> bool:
    """True if a pair's score is its logit, not the logit's sigmoid.

    Raises:
        ModelLoadError: a file cannot be read, or asks for another function.
    """
    config = _read(folder / "config.json")
    within = config.get("sentence_transformers")
    name = (
        _read(folder / "config_sentence_transformers.json").get("activation_fn")
        or (within.get("activation_fn") if is_object(within) else None)
        or config.get("sbert_ce_default_activation_function")
    )
    kind = None if name is None else str(name).rpartition(".")[2]
    if kind not in (None, "Identity", "Sigmoid"):
        raise ModelLoadError(f"{folder}: scores by {name} are not supported.")
    return kind == "Identity"


def _read(file: Path) -> Mapping[str, Any]:
    if not file.exists():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise ModelLoadError(f"{file} could not be read: {cause}") from cause
    return config if is_object(config) else {}
