"""What the files of sentence-transformers say about a cross-encoder's scores.

See https://sbert.net/docs/package_reference/cross_encoder/cross_encoder.html. The function that is
applied to the logit of a pair has been written to three places in turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_parallm.types.errors import ModelLoadError


def scores_are_logits(folder: Path) -> bool:
    """Whether a pair's score is its logit itself, and not the logistic function of it.

    Raises:
        ModelLoadError: a file cannot be read, or asks for another function.
    """
    config = _read(folder / "config.json")
    within = config.get("sentence_transformers")
    name = (
        _read(folder / "config_sentence_transformers.json").get("activation_fn")
        or (within.get("activation_fn") if isinstance(within, dict) else None)
        or config.get("sbert_ce_default_activation_function")
    )
    kind = None if name is None else str(name).rpartition(".")[2]
    if kind not in (None, "Identity", "Sigmoid"):
        raise ModelLoadError(f"{folder}: scores by {name} are not served.")
    return kind == "Identity"


def _read(file: Path) -> Mapping[str, Any]:
    if not file.exists():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise ModelLoadError(f"{file} could not be read: {cause}") from cause
    return found if isinstance(found, dict) else {}
