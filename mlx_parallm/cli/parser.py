"""A command's argument parser, which suggests flags for misspelt ones."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from mlx_parallm.types.json_values import is_mapping

UNKNOWN = "unrecognized arguments: "
#: ``MAX_HINTS``: most flags that a message suggests for an unknown one.
MAX_HINTS = 3
MASKED_LMS = "masked LMs are recognised by their files; name them with --model"
RANKS = "the ranks that mlx.launch starts share a model: docs/clusters.md"
#: ``ELSEWHERE``: what serves the purpose of flags that this command does not have, by flag.
ELSEWHERE = {
    "--enable-mlm": MASKED_LMS,
    "--mlm-models": MASKED_LMS,
    "--pipeline-parallel-size": RANKS,
    "--tensor-parallel-size": RANKS,
}


class CommandParser(argparse.ArgumentParser):
    """A parser that allows positional arguments between flags, and no abbreviated flags."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """See ``ArgumentParser.parse_args``."""
        namespace = argparse.Namespace() if namespace is None else namespace
        if self._commands():
            super().parse_args(args, namespace)
        else:
            self.parse_intermixed_args(args, namespace)
        return namespace

    def error(self, message: str) -> Any:
        """Exit with status 2 and a line with the error and suggestions."""
        if message.startswith(UNKNOWN):
            words = message.removeprefix(UNKNOWN).split(" ")
            message = UNKNOWN + " ".join(self._with_hint(word) for word in words)
        super().error(message)

    def _with_hint(self, word: str) -> str:
        if not word.startswith("--"):
            return word
        flag = word.partition("=")[0].lower().replace("_", "-")
        if flag in ELSEWHERE:
            return f"{word} ({ELSEWHERE[flag]})"
        # The comparison leaves the dashes out, because they would make all flags similar.
        name = flag.removeprefix("--")
        known_names = sorted({flag.removeprefix("--") for flag in self._flags()})
        longer = [flag for flag in known_names if flag.startswith(name)]
        closest = longer[:MAX_HINTS] or difflib.get_close_matches(name, known_names, n=1)
        hint = " or ".join(f"--{flag}" for flag in closest)
        return f"{word} (did you mean {hint}?)" if hint else word

    def _flags(self) -> Iterator[str]:
        for flag, action in self._option_string_actions.items():
            # Hidden flags are former names.
            if flag.startswith("--") and action.help != argparse.SUPPRESS:
                yield flag
        for parser in self._commands():
            yield from parser._flags()

    def _commands(self) -> list[CommandParser]:
        """Return the parsers of this command's subcommands."""
        choices = [action.choices for action in self._actions if is_mapping(action.choices)]
        parsers = [parser for by_name in choices for parser in by_name.values()]
        return [parser for parser in parsers if isinstance(parser, CommandParser)]
