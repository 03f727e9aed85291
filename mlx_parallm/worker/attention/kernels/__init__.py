"""The texts of the GPU kernels that attend and multiply."""

from pathlib import Path

TEXTS = Path(__file__).parent
