"""The processes that a server or a command has started."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable


def engines_of(parent: int) -> list[int]:
    """Return the ids of the engine processes of a process, in ascending order."""
    listed = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    )
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
    engines = [row for row in rows if "engine_process" in row[2]]
    return sorted(int(pid) for pid, own_parent, _ in engines if int(own_parent) == parent)


def are_gone(processes: Iterable[int]) -> bool:
    """True if no process has one of these ids."""
    return not any(_exists(process) for process in processes)


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
