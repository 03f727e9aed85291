"""The texts of the GPU kernels that attend and multiply, one folder a language."""

from pathlib import Path

TEXTS = Path(__file__).parent
