"""Where the embedded demonstration model lies."""

from __future__ import annotations

from pathlib import Path


def model_path() -> Path:
    """The folder of the model shipped with the package, in mlx_lm's form."""
    return Path(__file__).resolve().parent / "model"
