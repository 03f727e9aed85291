"""Notices what hangs: the event loop of the server's first process, or a step of an engine."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from mlx_parallm.peers.silence import CHECKS, Silence

logger = logging.getLogger(__name__)

# STACK_S, CHECK_S: seconds after which the stack of a loop that does not turn is logged, and those
# between two checks.
STACK_S = 30.0
CHECK_S = STACK_S / CHECKS
# END_CHECKS: checks after which the process ends, 120 s: nothing else could end it any more.
END_CHECKS = 4 * CHECKS
# LONG_STEP_S: a step that runs for longer is logged, and again whenever the time has doubled.
LONG_STEP_S = 60.0
# DEBUGGERS: modules of debuggers, whose frames are on the stack while they wait for their user.
DEBUGGERS = ("bdb", "pdb", "pydevd", "_pydevd_bundle")


class Watchdog:
    """Checks from a thread of its own whether an event loop turns, and how long steps run.

    The loop's checks are counted, as ``Silence`` does: no time passes for a process that is
    stopped.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        steps_s: Callable[[], Sequence[float]],
        end: Callable[[], None],
    ) -> None:
        """Prepare, on the thread of the loop.

        Args:
            loop: the event loop.
            steps_s: returns for how long the step in flight of each engine has run, in seconds.
            end: ends the process, whose loop hangs.
        """
        self._loop = loop
        self._thread_id = threading.get_ident()
        self._steps_s = steps_s
        self._end = end
        self._silence = Silence()
        self._silence.begin()
        self._fails = False
        # The length at which a long step was logged last, by the number of its engine.
        self._logged_s: dict[int, float] = {}

    def check(self) -> None:
        """Check both; call it every ``CHECK_S``."""
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] - documented
        frame = frames.get(self._thread_id)
        if is_debugged(frame):
            # Somebody looks at the loop, and may take long.
            self._note_turn()
        num_checks = self._silence.check()
        if num_checks == CHECKS:
            stack = "".join(traceback.format_stack(frame))
            logger.error("the event loop has not turned for %g s; it is at\n%s", STACK_S, stack)
        elif num_checks >= END_CHECKS:
            logger.critical("the event loop hangs; the server ends")
            self._end()
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._note_turn)
        for rank, step_s in enumerate(self._read_steps_s()):
            self._check_step(rank, step_s)

    def _read_steps_s(self) -> Sequence[float]:
        """Return the steps' times; none if they cannot be read, which is logged once."""
        try:
            steps_s = self._steps_s()
        except Exception:
            if not self._fails:
                logger.exception("the time of the steps in flight cannot be read")
            self._fails = True
            return ()
        self._fails = False
        return steps_s

    def _note_turn(self) -> None:
        self._silence.end()
        self._silence.begin()

    def _check_step(self, rank: int, step_s: float) -> None:
        if step_s < LONG_STEP_S:
            self._logged_s.pop(rank, None)
        elif step_s >= 2 * self._logged_s.get(rank, 0.0):
            self._logged_s[rank] = step_s
            logger.warning("engine %d: the step in flight has run for %.0f s", rank, step_s)


def is_debugged(frame: FrameType | None) -> bool:
    """True if a debugger has stopped the thread of this frame, or follows all threads."""
    # Debuggers use this since Python 3.12.
    monitoring = getattr(sys, "monitoring", None)
    if monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None:
        return True
    while frame is not None:
        # A trace function says less: one stays in the lowest frame after a debugger has gone on.
        if str(frame.f_globals.get("__name__")).partition(".")[0] in DEBUGGERS:
            return True
        frame = frame.f_back
    return False


@contextmanager
def watching(
    loop: asyncio.AbstractEventLoop, steps_s: Callable[[], Sequence[float]]
) -> Generator[None]:
    """Watch the loop, on whose thread this is called, while the block runs."""
    watchdog = Watchdog(loop, steps_s, end_at_once)
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(CHECK_S):
            watchdog.check()

    threading.Thread(target=watch, name="watchdog", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def end_at_once(status: int = 1) -> None:
    """End this process without its threads and its loop, which hang; its children end then too."""
    logging.shutdown()
    os._exit(status)
