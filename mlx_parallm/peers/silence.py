"""Notices a process or an event loop that lives and says nothing: it was stopped, or it hangs.

A process that is stopped keeps its end of a channel, and its own threads cannot end it. So it sends
beats while it runs, and the other end counts what comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

# CHECKS, BEATS: how often within a timeout it is asked whether something came, and beats are sent.
CHECKS, BEATS = 4, 8


class Silence:
    """Knows for how many checks in a row nothing came.

    Checks are counted instead of seconds: while this process is stopped itself, it hears nothing.

    Attributes:
        num_checks: the checks in a row until the latest one before which nothing came.
    """

    def __init__(self) -> None:
        self.num_checks = 0
        self._is_listening = False
        self._num_heard = 0
        self._num_known = 0

    def begin(self) -> None:
        """Note that the next message is waited for."""
        self._is_listening = True

    def end(self) -> None:
        """Note that a message has come, and that nobody listens before it is seen to."""
        self._is_listening = False
        self._num_heard += 1

    def check(self) -> int:
        """Return ``num_checks``, this one included; call it at equal intervals."""
        is_silent = self._is_listening and self._num_heard == self._num_known
        self._num_known = self._num_heard
        self.num_checks = self.num_checks + 1 if is_silent else 0
        return self.num_checks


@contextmanager
def watched(
    silence: Silence,
    timeout_s: float,
    on_silent: Callable[[], None],
    limit: Callable[[], int] = lambda: CHECKS,
) -> Generator[None]:
    """Call ``on_silent``, once and on another thread, if a process is silent for ``timeout_s``.

    Args:
        silence: of the process.
        timeout_s: the time of ``CHECKS`` checks, in seconds.
        on_silent: called then.
        limit: returns how many checks in a row it may be silent now.
    """
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(timeout_s / CHECKS):
            if silence.check() >= limit():
                on_silent()
                return

    thread = threading.Thread(target=watch, name="silence", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def beat(timeout_s: float, send: Callable[[], None]) -> None:
    """Send a beat now, and ``BEATS`` in each timeout, on a thread that ends with this process."""
    never = threading.Event()

    def run() -> None:
        # The other end is gone if this fails; who reads from it ends this process.
        with suppress(OSError):
            send()
            while not never.wait(timeout_s / BEATS):
                send()

    threading.Thread(target=run, name="beats", daemon=True).start()
