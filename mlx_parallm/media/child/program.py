"""The program that reads one file: ``python -I program.py READER CPU_S WALL_S``.

Some files make their readers crash, and take memory and time, so each is read by a process of its
own, which bounds itself before it loads the reader: a file of this folder that has nothing but
Python and the package that it is for. The request is a line of JSON on stdin, of which ``size`` is
the length of the file that follows; the answer is the reader's, on stdout.
"""

from __future__ import annotations

import json
import os
import resource
import runpy
import signal
import sys
from typing import Any

# MEMORY_BYTES: most address space, besides the file.
MEMORY_BYTES = 1 << 30
# NICENESS: how far it lets the server's own work go first.
NICENESS = 10
# OUT_OF_MEMORY: the exit code if the file takes more memory than there may be.
OUT_OF_MEMORY = 3


def main() -> None:
    """Answer the request."""
    reader, cpu_s, wall_s = sys.argv[1:]
    request: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    size: int = request.pop("size")
    _bound(int(cpu_s), float(wall_s), MEMORY_BYTES + size)
    try:
        # The limits hold while the reader is loaded, too.
        answer = runpy.run_path(reader)["answer"]
        answer(sys.stdin.buffer.read(size), sys.stdout.buffer, **request)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def _bound(cpu_s: int, wall_s: float, memory_bytes: int) -> None:
    os.nice(NICENESS)
    # Processes inherit ignored signals.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, wall_s)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if sys.platform == "linux":
        # macOS has this limit without enforcing it.
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


if __name__ == "__main__":
    main()
