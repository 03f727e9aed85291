"""The texts of the GPU kernels that sample, one folder a language."""

from pathlib import Path

TEXTS = Path(__file__).parent
