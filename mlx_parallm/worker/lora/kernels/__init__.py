"""The texts of the GPU kernels that add what adapters change, one folder a language."""

from pathlib import Path

TEXTS = Path(__file__).parent
