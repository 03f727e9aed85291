"""The processes that a server or a command has started."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable


def engines_of(parent: int) -> list[int]:
    """Return the ids of the engine processes of a process, in ascending order."""
    return [pid for pid, arguments in _children(parent) if "engine_process" in arguments]


def is_replaced(parent: int, engine: int) -> bool:
    """True if there is another engine process in the place of one of two."""
    engines = engines_of(parent)
    return engine not in engines and len(engines) == 2


def children_of(parent: int) -> list[int]:
    """Return the ids of the processes that a process has started, in ascending order."""
    return [pid for pid, _ in _children(parent)]


def _children(parent: int) -> list[tuple[int, str]]:
    listed = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    )
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
    return sorted((int(pid), args) for pid, own, args in rows if int(own) == parent)


def are_gone(processes: Iterable[int]) -> bool:
    """True if no process has one of these ids."""
    return not any(_exists(process) for process in processes)


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
