"""`mlx_parallm` as of another release."""

from __future__ import annotations

import sys

import mlx_parallm

mlx_parallm.__version__ = "0.0.7"

from mlx_parallm.cli.main import main  # noqa: E402 - the release comes first

if __name__ == "__main__":
    sys.exit(main())
