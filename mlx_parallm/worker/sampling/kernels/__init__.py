"""The texts of the GPU kernels that sample, which CUDA and Metal share."""

from pathlib import Path

TEXTS = Path(__file__).parent
