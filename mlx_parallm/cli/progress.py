"""Progress of loading: a bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import TextIO

WIDTH = 30
#: Without a terminal a line is written each time this share more is done.
PLAIN_STEP = 0.25


class ProgressPrinter:
    """Called with a text and a share from 0 to 1; a new text starts a new bar."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._text = ""
        self._shown = -1.0

    def __call__(self, text: str, fraction: float) -> None:
        """Show it, if it is news."""
        if text != self._text:
            if self._text and self._shown < 1 and self._stream.isatty():
                self._stream.write("\n")
            self._text, self._shown = text, -1.0
        step = 0.01 if self._stream.isatty() else PLAIN_STEP
        is_news = self._shown < 0 or fraction >= self._shown + step or fraction >= 1 > self._shown
        if is_news:
            self._shown = fraction
            self._show(fraction)

    def _show(self, fraction: float) -> None:
        percent = f"{100 * fraction:3.0f}%"
        if self._stream.isatty():
            bar = "#" * round(WIDTH * fraction)
            end = "\n" if fraction >= 1 else ""
            self._stream.write(f"\r{self._text} [{bar:<{WIDTH}}] {percent}{end}")
        else:
            self._stream.write(f"{self._text} {percent}\n")
        self._stream.flush()
