"""Processes that are the ranks of one model, over MLX's ring on this machine."""

from __future__ import annotations

import os
import pickle
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mlx_parallm.child_process import ChildProcess
from mlx_parallm.serving.local_ranks import ring_ranks

# LIMIT_S ends ranks that wait for each other for ever.
LIMIT_S = 150


def run_ranks(size: int, folder: Path, target: Sequence[str]) -> list[Any]:
    """Return what each rank of a module pickled into the file that is its first argument.

    Args:
        size: the number of ranks.
        folder: where files are written.
        target: the module, and its arguments after the first.
    """
    outputs = [folder / f"rank{rank}" for rank in range(size)]
    module, *arguments = target
    with ExitStack() as started:
        ranks: list[ChildProcess] = []
        for output, variables in zip(outputs, ring_ranks(size, folder), strict=True):
            process = ChildProcess(
                [module, str(output), *arguments],
                env={**os.environ, **variables},
                stderr=subprocess.PIPE,
                text=True,
            )
            started.callback(process.kill)
            ranks.append(process)
        errors = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(errors)
    return [pickle.loads(output.read_bytes()) for output in outputs]
