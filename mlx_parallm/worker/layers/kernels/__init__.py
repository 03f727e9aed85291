"""The texts of the kernels of recurrent layers; on Metal, mlx_lm's and MLX's own are used."""

from __future__ import annotations

from pathlib import Path

#: The folder that has one folder of texts for each kernel language.
TEXTS = Path(__file__).parent
