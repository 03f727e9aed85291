"""Texts of the kernels of recurrent layers; Metal's are mlx_lm's and MLX's own."""

from __future__ import annotations

from pathlib import Path

#: Has a folder a language.
TEXTS = Path(__file__).parent
