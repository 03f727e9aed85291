"""The texts of the kernels that read and write pinned memory of the host; they are CUDA's."""

from __future__ import annotations

from pathlib import Path

#: ``TEXTS``: the folder of the texts.
TEXTS = Path(__file__).parent
