"""Tells from a config whether this package implements a folder's encoder."""

from __future__ import annotations

import json
from pathlib import Path

from mlx_parallm.types.json_values import is_object

#: ``ENCODER_TYPES``: the values of ``model_type`` for which ``models/loading.py`` has a module;
#: processes without MLX read only the names.
ENCODER_TYPES = frozenset(
    {
        "bert",
        "deberta-v2",
        "distilbert",
        "electra",
        "gte",
        "modernbert",
        "mpnet",
        "new",
        "nomic_bert",
        "roberta",
        "xlm-roberta",
    }
)


def is_encoder(folder: Path) -> bool:
    """Return True if a folder's config names an architecture of this package."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # The load will say what is wrong.
        return False
    return is_object(config) and config.get("model_type") in ENCODER_TYPES
