"""The texts of the GPU kernels that add adapters' changes, one folder a language."""

from pathlib import Path

TEXTS = Path(__file__).parent
