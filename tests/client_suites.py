"""Suites of unmodified clients, each in an environment of its own, against one live server."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from mlx_parallm.peers import child_process


class Named(Protocol):
    """A suite, as far as choosing and telling goes."""

    @property
    def name(self) -> str:
        """One word."""
        ...


class Command(Named, Protocol):
    """A suite that can be run."""

    def command(self, results: Path) -> list[str]:
        """Return the command that runs it and writes JUnit's XML."""
        ...


S = TypeVar("S", bound=Named)


def choose(suites: Sequence[S], words: Sequence[str]) -> list[S]:
    """Return the suites with one of the words in their names; all if there are no words."""
    return [suite for suite in suites if not words or any(word in suite.name for word in words)]


def run_suite(suite: Command, folder: Path, results: Path, variables: Mapping[str, str]) -> bool:
    """Run one suite in a folder; True if nothing failed.

    ``results`` is the folder for its XML, ``variables`` are added to its environment.
    """
    file = results / f"{suite.name}.xml"
    file.unlink(missing_ok=True)
    target = [child_process.COMMAND, *suite.command(file)]
    return child_process.run(target, cwd=folder, env={**os.environ, **variables}).returncode == 0


def failed_of(chosen: Sequence[Named], passed: Sequence[bool]) -> list[str]:
    """Return the names of the suites that did not pass."""
    return [suite.name for suite, well in zip(chosen, passed, strict=True) if not well]
