"""The texts of the GPU kernels that add adapters' changes, which CUDA and Metal share."""

from pathlib import Path

TEXTS = Path(__file__).parent
