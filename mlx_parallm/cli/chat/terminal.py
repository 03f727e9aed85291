"""The terminal: lines of the user, and texts of a model that may not control it."""

from __future__ import annotations

import contextlib
import importlib
import sys

#: ``BLOCK``: begins and ends a question of several lines.
BLOCK = '"""'
PROMPT, MORE = ">>> ", "... "
DIM, NORMAL = "\x1b[2m", "\x1b[0m"
#: ``CONTROLS``: characters of a model that a terminal would obey; line breaks and tabs are none.
CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)))


class Terminal:
    """Standard input and output."""

    def __init__(self) -> None:
        self.is_interactive = sys.stdin.isatty()
        self._is_dim = False
        self._shows_style = sys.stdout.isatty()
        for stream in (sys.stdin, sys.stdout):
            # A character that a terminal cannot show or send is no reason to end.
            reconfigure = getattr(stream, "reconfigure", None)
            if reconfigure is not None:
                reconfigure(errors="replace")
        with contextlib.suppress(ImportError):
            # input() edits lines and remembers them once this is imported.
            importlib.import_module("readline")

    def read(self) -> str:
        """Return a question; several lines may stand between lines that begin a block.

        Raises:
            EOFError: there is no more input.
        """
        line = self._line(PROMPT)
        if not line.lstrip().startswith(BLOCK):
            return line.strip()
        lines = [line.lstrip().removeprefix(BLOCK)]
        while not lines[-1].rstrip().endswith(BLOCK):
            lines.append(self._line(MORE))
        lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
        return "\n".join(lines).strip()

    def _line(self, prompt: str) -> str:
        return input(prompt if self.is_interactive else "")

    def write(self, text: str, *, is_dim: bool = False) -> None:
        """Show a part of an answer at once; ``is_dim``: of its reasoning, only on a terminal."""
        if is_dim and not self._shows_style:
            return
        if is_dim != self._is_dim:
            self._set_dim(is_dim)
        print(text.translate(CONTROLS), end="", flush=True)

    def _set_dim(self, is_dim: bool) -> None:
        self._is_dim = is_dim
        print(DIM if is_dim else NORMAL, end="")
        if not is_dim:
            # The answer follows its reasoning.
            print("\n")

    def end(self, note: str = "") -> None:
        """End an answer, perhaps with a note."""
        if self._is_dim:
            self._set_dim(False)
        print(note, flush=True)

    def say(self, text: str) -> None:
        """Show a line of this program."""
        print(text.translate(CONTROLS), flush=True)
