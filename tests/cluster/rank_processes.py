"""Processes that are the ranks of one model, over MLX's ring on this machine."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_parallm.peers.child_process import ChildProcess, end_at_eof
from mlx_parallm.serving.local_ranks import ring_ranks

# WITH_OPENBLAS: ranks compute as engine processes do.
WITH_OPENBLAS = ("mlx_parallm.process_setup.openblas",)
# LIMIT_S ends ranks that wait for each other for ever.
LIMIT_S = 150


def run_ranks(size: int, folder: Path, target: Sequence[str]) -> list[Any]:
    """Return what each rank of a module pickled into the file that is its first argument.

    Args:
        size: the number of ranks.
        folder: where files are written.
        target: the module, whose ``main`` is called, and its arguments after the first.
    """
    process = ChildProcess(
        [*WITH_OPENBLAS, "tests.cluster.rank_processes", str(size), str(folder), *target],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, errors = process.communicate(timeout=LIMIT_S)  # time limit: of ranks that wait for ever
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors
    return [pickle.loads(_output(folder, rank).read_bytes()) for rank in range(size)]


def _output(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}"


def main() -> int:
    """Import the module once, fork its ranks, and return 1 as soon as one of them fails.

    Imports take seconds of CPU time; the others end with this process.
    """
    size, folder, module, *arguments = sys.argv[1:]
    target = importlib.import_module(module)
    read_end, write_end = os.pipe()
    for rank, variables in enumerate(ring_ranks(int(size), Path(folder))):
        if os.fork() == 0:
            os.close(write_end)
            end_at_eof(read_end)
            _run(target, [str(_output(Path(folder), rank)), *arguments], variables)
    codes = (os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(int(size)))
    return int(any(codes))


def _run(target: Any, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
    """Run a module as a rank, and end this process."""
    os.environ.update(variables)
    sys.argv = [target.__name__, *arguments]
    code = 1
    try:
        target.main()
        code = 0
    except Exception:  # noqa: BLE001 - the test reads it
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
