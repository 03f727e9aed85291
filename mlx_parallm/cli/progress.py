"""Progress of loading, shown as a bar on a terminal, as a few plain lines, or as log records."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import TextIO

from mlx_parallm.cli.logs import is_json

logger = logging.getLogger(__name__)

WIDTH = 30
#: ``PLAIN_STEP``: without a terminal, a line is written whenever this share more is done.
PLAIN_STEP = 0.25


def progress_shown() -> Callable[[str, float], None]:
    """Return a function that shows progress: as log records if log lines are JSON, else as text."""
    return ProgressPrinter(show=_log) if is_json() else ProgressPrinter()


def _log(text: str, fraction: float) -> None:
    logger.info(text, extra={"progress": round(fraction, 2)})


class ProgressPrinter:
    """A callable of a text and a share from 0 to 1; a new text starts a new bar."""

    def __init__(
        self, stream: TextIO | None = None, show: Callable[[str, float], None] | None = None
    ) -> None:
        """``show`` replaces ``stream`` and is called as rarely as plain lines are written."""
        self._stream = stream or sys.stderr
        self._is_bar = show is None and self._stream.isatty()
        self._show = show or self._write
        self._text = ""
        self._shown = -1.0

    def __call__(self, text: str, fraction: float) -> None:
        """Show the progress if it has changed enough."""
        if text != self._text:
            if self._text and self._shown < 1 and self._is_bar:
                self._stream.write("\n")
            self._text, self._shown = text, -1.0
        step = 0.01 if self._is_bar else PLAIN_STEP
        is_news = self._shown < 0 or fraction >= self._shown + step or fraction >= 1 > self._shown
        if is_news:
            self._shown = fraction
            self._show(text, fraction)

    def _write(self, text: str, fraction: float) -> None:
        percent = f"{100 * fraction:3.0f}%"
        if self._is_bar:
            bar = "#" * round(WIDTH * fraction)
            end = "\n" if fraction >= 1 else ""
            self._stream.write(f"\r{text} [{bar:<{WIDTH}}] {percent}{end}")
        else:
            self._stream.write(f"{text} {percent}\n")
        self._stream.flush()
