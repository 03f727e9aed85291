"""Load on a live server, with every answer checked.

Modules that compute with MLX do so with the BLAS that the server has.
"""

from __future__ import annotations

from mlx_parallm.process_setup.openblas import load_openblas

load_openblas()
