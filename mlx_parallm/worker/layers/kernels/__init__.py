"""The texts of the kernels of recurrent layers; on Metal, mlx_lm's and MLX's own are used."""

from __future__ import annotations

from pathlib import Path

#: ``TEXTS``: the folder of the texts, which are CUDA's.
TEXTS = Path(__file__).parent
#: ``HEADERS``: the texts that stand before each of them.
HEADERS = ("common.cu",)
