"""Listeners for engines on this machine, and a cable between them and a server."""

from __future__ import annotations

import math
import os
import re
import selectors
import signal
import socket
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mlx_parallm.peers.addresses import Address
from mlx_parallm.peers.child_process import ChildProcess
from tests.processes import children_of

ROOT = Path(__file__).resolve().parent.parent
#: What a listener logs once it can be dialled.
LISTENS = re.compile(r"for servers that dial 127\.0\.0\.1:(\d+)")


class Listener:
    """`mlx_parallm engine --listen 127.0.0.1:0 FLAGS`, or another program with such flags.

    Attributes:
        address: where it is dialled.
        process: of the listener.
    """

    def __init__(self, *flags: str, program: Sequence[str] = ("mlx_parallm", "engine")) -> None:
        """Start it, and wait until it listens."""
        self._log = tempfile.NamedTemporaryFile(mode="w+", suffix=".log")  # noqa: SIM115
        self.process = ChildProcess(
            [*program, "--listen", "127.0.0.1:0", *flags],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
        )
        weakref.finalize(self, _abandon, self.process)
        while (listens := LISTENS.search(self.log)) is None:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.05)  # time limit: of one question
                raise AssertionError(f"the listener ended:\n{self.log}")
        self.address = Address("127.0.0.1", int(listens[1]))

    @property
    def log(self) -> str:
        """Everything that it and its engines have printed."""
        return Path(self._log.name).read_text()

    @property
    def engines(self) -> list[int]:
        """The ids of its engines' processes."""
        return children_of(self.process.pid)

    def stop(self) -> int:
        """End it and its engines; return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait()
        self._log.close()
        return code


def _abandon(process: subprocess.Popen[bytes]) -> None:
    for pid in children_of(process.pid) if process.poll() is None else ():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait()


class Cable:
    """A port of this machine that is connected with an address until it is cut.

    Attributes:
        address: the port.
    """

    def __init__(self, to: Address, cut_after: float = math.inf) -> None:
        """Lay it; ``cut_after``: bytes of answers after which it is cut."""
        self._to = to
        self._left = cut_after
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self._is_whole = threading.Event()
        self._is_whole.set()
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Let nothing through any more; neither end learns of it."""
        self._is_whole.clear()

    def mend(self) -> None:
        """Close the connections that were cut, and let new ones through."""
        ends, self._ends = self._ends, []
        for end in ends:
            with suppress(OSError):
                # A thread may wait for it, so that closing alone would end nothing.
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._is_whole.set()

    def close(self) -> None:
        """Close everything."""
        self._listener.close()
        self.mend()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                ours, _ = self._listener.accept()
                self._is_whole.wait()
                theirs = socket.create_connection(self._to.pair)
                self._ends += [ours, theirs]
                threading.Thread(target=self._carry, args=(ours, theirs), daemon=True).start()

    def _carry(self, ours: socket.socket, theirs: socket.socket) -> None:
        # select() takes no descriptors above 1,023, and this process may have as many.
        with suppress(OSError, ValueError), selectors.PollSelector() as selector:
            selector.register(ours, selectors.EVENT_READ, (ours, theirs))
            selector.register(theirs, selectors.EVENT_READ, (theirs, ours))
            while True:
                for key, _ in selector.select():
                    end, other = key.data
                    data = end.recv(1 << 16)
                    if not self._is_whole.is_set():
                        return
                    if not data:
                        ours.close()
                        theirs.close()
                        return
                    if end is theirs:
                        self._left -= len(data)
                    other.sendall(data)
                    if self._left <= 0:
                        self.cut()
