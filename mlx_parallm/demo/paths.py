"""Where the models of the package lie."""

from __future__ import annotations

from pathlib import Path


def model_path() -> Path:
    """The folder of the model shipped with the package, in mlx_lm's form."""
    return Path(__file__).resolve().parent / "model"


def encoder_path(name: str) -> Path:
    """The folder of one of the package's encoders, in Hugging Face's form."""
    return Path(__file__).resolve().parent / "encoders" / "models" / name
