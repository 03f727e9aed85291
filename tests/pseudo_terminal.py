"""A program in a pseudo-terminal, as a person at a keyboard sees it."""

from __future__ import annotations

import fcntl
import os
import pty
import subprocess
import termios
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from mlx_parallm.peers.child_process import ChildProcess

CTRL_C, CTRL_D = "\x03", "\x04"


class PseudoTerminal:
    """A process whose terminal is this object; everything that it shows is in ``shown``."""

    def __init__(self, target: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
        self.shown = ""
        self._read = 0
        self._keyboard, screen = pty.openpty()
        termios.tcsetwinsize(screen, (24, 120))
        settings = {"TERM": "xterm", "INPUTRC": "/dev/null"}
        self.process = ChildProcess(
            target,
            stdin=screen,
            stdout=screen,
            stderr=screen,
            start_new_session=True,
            # Keys such as Ctrl-C become signals only in the terminal that controls the session.
            preexec_fn=lambda: fcntl.ioctl(screen, termios.TIOCSCTTY, 0),
            env={**environment, **settings},
        )
        os.close(screen)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._keyboard)

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._keyboard, keys.encode())

    def wait_for(self, text: str) -> str:
        """Return what is shown up to a text, since the text waited for before."""
        while (place := self.shown.find(text, self._read)) < 0:
            assert self._show_more(), f"the program ended; it showed {self.shown!r}"
        begin, self._read = self._read, place + len(text)
        return self.shown[begin : self._read]

    def wait_until_asleep(self) -> None:
        """Return once the program waits for something.

        readline loses a signal that comes just before it waits for a key.
        """
        command = ["ps", "-o", "stat=", "-p", str(self.process.pid)]
        while not subprocess.run(command, capture_output=True, check=True).stdout.startswith(b"S"):
            pass

    def wait_for_end(self) -> int:
        """Return the exit status once the program has ended."""
        while self._show_more():
            pass
        return self.process.wait()

    def _show_more(self) -> bool:
        try:
            data = os.read(self._keyboard, 4096)
        except OSError:
            # Linux reports an error once no process has the terminal any more.
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)
