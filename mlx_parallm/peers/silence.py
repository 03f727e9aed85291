"""Notices a process or an event loop that lives and says nothing: it was stopped, or it hangs.

A process that is stopped keeps its end of a channel, and its own threads cannot end it. So it sends
beats while it runs, and the other end counts what comes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

from mlx_parallm.peers.channel import Channel
from mlx_parallm.peers.messages import Beat, Ready, Starting

logger = logging.getLogger(__name__)

#: ``SILENCE_TIMEOUT_S``: a process that says nothing for so many seconds counts as dead.
SILENCE_TIMEOUT_S = 60.0
# CHECKS, BEATS: how often within a timeout it is asked whether something came, and beats are sent.
CHECKS, BEATS = 4, 8


class Silence:
    """Knows for how many checks in a row nothing came.

    Checks are counted instead of seconds: while this process is stopped itself, it hears nothing.

    Attributes:
        num_checks: the checks in a row before which nothing came, since the latest message.
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
        self.num_checks = 0

    def check(self) -> int:
        """Return ``num_checks``, this one included; call it at equal intervals."""
        is_silent = self._is_listening and self._num_heard == self._num_known
        self._num_known = self._num_heard
        self.num_checks = self.num_checks + 1 if is_silent else 0
        return self.num_checks


class Pulse:
    """The signs of life of a process: its beats, and when nothing came.

    Attributes:
        silence: knows for how long nothing has come.
        limit: the checks in a row for which nothing may come. It is larger while the process
            starts: on this machine it cannot beat before it has imported its modules, and while
            ranks join each other, MLX keeps the GIL.
        step_s: for how long the step in flight has run by the latest beat, in seconds.
    """

    def __init__(self, start_checks: int, has_started: type[Beat | Ready]) -> None:
        """Begin; ``start_checks`` is the ``limit`` up to the first message of ``has_started``."""
        self._has_started = has_started
        self.silence = Silence()
        self.limit = start_checks
        self.step_s = 0.0
        self._is_reported = False

    @property
    def is_weak(self) -> bool:
        """True if nothing came for half of the timeout."""
        return self.silence.num_checks >= self.limit // 2

    def report_silence(self, message: str) -> None:
        """Log a message once until the process says something again."""
        if not self._is_reported:
            logger.warning("%s", message)
        self._is_reported = True

    def receive(self, channel: Channel) -> tuple[Any, int]:
        """Return the next message that is no beat, and its number; see ``Channel.receive``."""
        while True:
            self.silence.begin()
            try:
                message, number = channel.receive()
            finally:
                self.silence.end()
            self._is_reported = False
            if isinstance(message, self._has_started):
                self.limit = CHECKS
            if isinstance(message, Beat):
                self.step_s = message.step_s
            elif not isinstance(message, Starting):
                return message, number


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
            # The first message after a start sets the count to 0, and then lowers the limit.
            most = limit()
            if silence.check() >= most:
                on_silent()
                return

    thread = threading.Thread(target=watch, name="silence", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def beat(timeout_s: float, send: Callable[[], None]) -> Callable[[], None]:
    """Send a beat now, and ``BEATS`` in each timeout, on a thread that ends with this process.

    Return what ends it earlier.
    """
    is_over = threading.Event()

    def run() -> None:
        # The other end is gone if this fails; who reads from it ends this process.
        with suppress(OSError):
            send()
            while not is_over.wait(timeout_s / BEATS):
                send()

    threading.Thread(target=run, name="beats", daemon=True).start()
    return is_over.set
