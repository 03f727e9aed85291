"""``python -m mlx_parallm``."""

from __future__ import annotations

import sys

from mlx_parallm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
