"""Starting the processes that read files, and what their ends mean."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

from mlx_parallm.media.child.program import OUT_OF_MEMORY

PROGRAM, READERS = Path(__file__).with_name("program.py"), Path(__file__).parent
# PROGRAM, READERS: the program, and the folder of its readers.
# ENDED_BY_FILE: exit codes for which the file is the reason: its memory or its processor time was
# over, or the reader crashed.
ENDED_BY_FILE = frozenset(
    {
        OUT_OF_MEMORY,
        *(
            -signal.Signals[f"SIG{name}"]
            for name in ("XCPU", "KILL", "SEGV", "ABRT", "BUS", "FPE", "ILL")
        ),
    }
)
#: ``OUT_OF_TIME``: the exit code if others had the processors.
OUT_OF_TIME = -signal.SIGALRM


def command(reader: str, cpu_s: int, wall_s: float = 0.0) -> list[str]:
    """Return the command line of a process.

    Args:
        reader: the name of the file in this folder that reads.
        cpu_s: most seconds with the processor.
        wall_s: most seconds altogether; 0 for no limit.
    """
    file = READERS / f"{reader}.py"
    return [sys.executable, "-I", str(PROGRAM), str(file), str(cpu_s), str(wall_s)]


def header_of(size: int, **arguments: Any) -> bytes:
    """Return what a process reads before a file: its size, and arguments of the reader."""
    return json.dumps({"size": size, **arguments}).encode() + b"\n"


def is_ended_by_file(exit_code: int | None) -> bool:
    """Return True if a process ended because its file is damaged or costs too much."""
    return exit_code in ENDED_BY_FILE
