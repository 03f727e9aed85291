"""The embedded demonstration model: its data, training, evaluation and files.

Modules that compute with MLX do so with OpenBLAS on Linux.
"""

from __future__ import annotations

from mlx_parallm.process_setup.openblas import load_openblas

load_openblas()
