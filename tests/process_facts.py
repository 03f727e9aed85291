"""Facts of a process and of its child, as lines of JSON; then it ends in a given way.

``python -m tests.process_facts END``: END is an exit status, ``exception`` or a signal's name.
``child`` is the child, which is started as a server starts its engines.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

PROC = Path("/proc/self")


def facts() -> dict[str, Any]:
    """Return what is alike in any two processes of a command."""
    return {
        "arguments": _without_numbers(sys.argv[1:]),
        "command": _without_numbers((PROC / "cmdline").read_text().rstrip("\0").split("\0")),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "group": os.getpgrp(),
        "terminals": [file.isatty() for file in (sys.stdin, sys.stdout, sys.stderr)],
        "buffers": [file.line_buffering for file in (sys.stdout, sys.stderr)],
        "actions": {number.name: str(signal.getsignal(number)) for number in signal.Signals},
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
        "nice": os.nice(0),
        "threads": [thread.name for thread in threading.enumerate()],
        "tasks": len(list((PROC / "task").iterdir())),
        "is main": threading.current_thread() is threading.main_thread(),
        "is new": resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime == 0,
    }


def _without_numbers(words: list[str]) -> list[str]:
    """Return words, with nothing in the place of those that number descriptors."""
    return ["" if word.isdigit() else word for word in words]


def descriptors() -> list[tuple[int, bool]]:
    """Return the types of this process's descriptors, and whether it passes them on."""
    kinds: list[tuple[int, bool]] = []
    for number in map(int, os.listdir(PROC / "fd")):
        try:
            kinds.append((stat.S_IFMT(os.fstat(number).st_mode), os.get_inheritable(number)))
        except OSError:
            # The folder's own is closed.
            continue
    return sorted(kinds)


def numbers() -> list[float]:
    """Return random numbers: Python's, and MLX's where that is imported."""
    mlx = sys.modules.get("mlx.core")
    return [random.random(), *([] if mlx is None else [mlx.random.uniform().item()])]


def main(end: str) -> None:
    """Print what there is to say, and end."""
    own = {"pid": os.getpid(), "parent": os.getppid(), "descriptors": descriptors()}
    sys.stdout.write(json.dumps(own | {"alike": facts(), "numbers": numbers()}) + "\n")
    atexit.register(print, "the end")
    if end == "child":
        return
    sys.stdout.flush()
    command = [sys.executable, "-P", "-m", "tests.process_facts", "child"]
    child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert child.wait() == 0
    if end == "exception":
        raise ValueError(end)
    if end in signal.Signals.__members__:
        os.kill(os.getpid(), signal.Signals[end])
    sys.exit(int(end))


if __name__ == "__main__":
    main(sys.argv[1])
