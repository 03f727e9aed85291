"""``python -m mlx_parallm`` with the GPU kernels compiled by MLX, for comparison."""

from __future__ import annotations

import sys

from mlx_parallm.cli.main import main
from mlx_parallm.kernels.language import CudaLanguage

if __name__ == "__main__":
    CudaLanguage.__init__.__defaults__ = (lambda: None,)
    sys.exit(main(sys.argv[1:]))
