"""Processes that end with the process that started them, on Linux and macOS.

The parent keeps the write end of a pipe and the child has its read end. However the parent ends,
by SIGKILL too, the kernel closes the write end, and a thread of the child ends the child.

The child is started by ``python -m mlx_parallm.peers.child_process LINK TARGET...``:

- LINK is the descriptor of the read end, or ``parent``: the child then ends when its parent is
  another process than at its start, for parents that cannot make a pipe (make).
- TARGET is a Python module with its arguments, which runs in this very process, or ``--`` and
  any other command, which runs as a child of it.

Only the standard library is needed.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from time import sleep
from types import FrameType
from typing import Any

#: GRACE_S: seconds from SIGTERM, on which a server ends its running requests, to SIGKILL.
GRACE_S = 60.0
PARENT = "parent"
PARENT_POLL_S = 0.5
COMMAND = "--"


class ChildProcess(subprocess.Popen[Any]):
    """A ``subprocess.Popen`` whose process ends with this one.

    Attributes:
        close_link: call it to let the child end as if this process had.
    """

    def __init__(
        self,
        target: Sequence[str],
        *,
        python: str | None = None,
        pass_fds: Sequence[int] = (),
        **options: Any,
    ) -> None:
        """Start it.

        Args:
            target: a Python module and its arguments, or ``--`` and any other command.
            python: an interpreter that can import this package; None is this process's.
            pass_fds: descriptors that the child inherits.
            options: further arguments of ``Popen``.
        """
        # Python makes descriptors close-on-exec, so no other child inherits the write end.
        read_end, write_end = os.pipe()
        # finalize also closes it when this process ends normally.
        self.close_link = weakref.finalize(self, os.close, write_end)
        launcher = [python or sys.executable, "-m", "mlx_parallm.peers.child_process"]
        try:
            super().__init__(
                [*launcher, str(read_end), *target], pass_fds=(*pass_fds, read_end), **options
            )
        except BaseException:
            self.close_link()
            raise
        finally:
            os.close(read_end)


def run(
    target: Sequence[str],
    *,
    data: str | bytes | None = None,
    timeout_s: float | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Run a ``ChildProcess`` to its end and return its output, as ``subprocess.run`` does.

    Args:
        target: see ``ChildProcess``.
        data: the process's standard input.
        timeout_s: ``TimeoutExpired`` is raised after it; the child ends.
        options: further arguments of ``ChildProcess``.
    """
    if data is not None:
        options["stdin"] = subprocess.PIPE
    with ChildProcess(target, **options) as process:
        try:
            output, errors = process.communicate(data, timeout_s)
        except BaseException:
            process.close_link()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def end_at_eof(descriptor: int) -> None:
    """End this process once the descriptor is at its end: SIGTERM, and SIGKILL after a time."""
    _watch(lambda: _wait_for_eof(descriptor), _end_self)


def main(arguments: Sequence[str]) -> int:
    """Run the target until it or the parent ends; return its exit status."""
    link, *target = arguments
    wait = _wait_of(link)
    if target[0] == COMMAND:
        return _supervise(target[1:], wait)
    _watch(wait, _end_self)
    sys.argv[1:] = target[1:]
    runpy.run_module(target[0], run_name="__main__", alter_sys=True)
    return 0


def _wait_of(link: str) -> Callable[[], None]:
    """Return a function that blocks until the parent is gone."""
    if link == PARENT:
        parent = os.getppid()
        return lambda: _wait_for_new_parent(parent)
    # The children of this process do not need the descriptor.
    os.set_inheritable(int(link), False)
    return lambda: _wait_for_eof(int(link))


def _wait_for_eof(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass


def _wait_for_new_parent(parent: int) -> None:
    while os.getppid() == parent:
        sleep(PARENT_POLL_S)


def _watch(wait: Callable[[], None], end: Callable[[], None]) -> None:
    def watch() -> None:
        wait()
        end()

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _end_self() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _supervise(command: Sequence[str], wait: Callable[[], None]) -> int:
    """Run a command that ends with the parent, or when this process receives SIGTERM."""
    is_stopping = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        is_stopping.set()
        if process is not None:
            process.terminate()

    def leave_to_command(_number: int, _frame: FrameType | None) -> None:
        """Do nothing, because a terminal sends SIGINT to the command too."""

    process: subprocess.Popen[bytes] | None = None
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, leave_to_command)
    process = subprocess.Popen(command)
    if is_stopping.is_set():
        process.terminate()
    running = process
    _watch(wait, lambda: _end(running))
    status = process.wait()
    # A shell reports the end by a signal as 128 plus its number.
    return status if status >= 0 else 128 - status


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
