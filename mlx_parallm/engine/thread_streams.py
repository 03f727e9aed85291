"""Frees the streams of a thread that has imported MLX indirectly."""

from __future__ import annotations

import sys


def free_streams() -> None:
    """Free MLX's streams of the calling thread, if anything has imported MLX into this process.

    mlx_lm makes a stream when it is imported, and tokenizers with Python code of their own import
    it where they are read or unpickled. A process that exits after a thread with streams has ended
    is aborted.
    """
    mlx = sys.modules.get("mlx.core")
    if mlx is not None:
        mlx.clear_streams()
