"""Runs tests with newer libraries than are allowed, and says on the page what broke.

``make newest`` installs the newest mlx, mlx-lm and transformers in an environment of its own, and
runs this. It fails only if it cannot run: what broke is news, and no fault of this project.
``ARGS="parity adapters"`` runs only the suites whose name holds one of the words, and then writes
no document.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_parallm.peers import child_process
from tests.client_suites import choose
from tests.compatibility_page import NEWEST, PAGE, with_section
from tests.conformance.report import Outcome, last_run, outcomes
from tests.corpus.suites import ROOT

PYTHON = ROOT / ".venv-newest" / "bin" / "python"
RESULTS = ROOT / "results" / "newest"
MODELS = ROOT / "docs" / "models.md"
PACKAGES = ("mlx", "mlx-lm", "transformers")
# LISTED: most failures that a row of the table names.
LISTED = 8
INTRODUCTION = """\
`make newest` runs these with the newest published mlx, mlx-lm and transformers, whatever the bounds
of this package are.
What fails here is no promise broken: the bounds and the pins are what is supported.
Architectures are tried only if mlx or mlx-lm is newer than the pinned one.
"""


@dataclass(frozen=True)
class Suite:
    """Files of tests that say whether newer libraries still do what is expected of them.

    Attributes:
        name: one word.
        paths: below ``tests``.
    """

    name: str
    paths: tuple[str, ...]

    def run(self) -> list[Outcome]:
        """Return how the tests went; one failure without a name if there are no results."""
        file = RESULTS / f"{self.name}.xml"
        file.unlink(missing_ok=True)
        paths = [f"tests/{path}" for path in self.paths]
        command = [str(PYTHON), "-m", "pytest", "-q", "-m", "", f"--junit-xml={file}", *paths]
        child_process.run([child_process.COMMAND, *command], cwd=ROOT)
        return list(outcomes(file)) if file.exists() else [Outcome("no results", "", "failed")]


@dataclass(frozen=True)
class Architectures:
    """The architectures of docs/models.md."""

    name: str = "architectures"

    def run(self) -> list[Outcome]:
        """Return an outcome for each architecture; it failed if it runs otherwise than before."""
        page = RESULTS / "models.md"
        page.unlink(missing_ok=True)
        command = [str(PYTHON), "-m", "benchmarks.architectures", "--output", str(page)]
        child_process.run([child_process.COMMAND, *command], cwd=ROOT)
        if not page.exists():
            return [Outcome("no results", "", "failed")]
        known, now = paths(MODELS.read_text()), paths(page.read_text())
        return [
            Outcome(name, "", "passed" if now.get(name) == path else "failed")
            for name, path in known.items()
        ]


SUITES: tuple[Suite | Architectures, ...] = (
    Suite("parity", ("integration/test_parity_generate.py", "integration/test_self_check.py")),
    Suite(
        "adapters",
        ("integration/test_generator_adapters.py", "integration/test_encoder_adapters.py"),
    ),
    Suite("encoders", ("integration/test_encoder_models.py",)),
    Suite("tokenizers", ("unit/tokenizer",)),
    Suite("images", ("integration/test_image_checkpoints.py",)),
    Architectures(),
)


def suites_for(
    newest: Mapping[str, str], pins: Mapping[str, str]
) -> Sequence[Suite | Architectures]:
    """Return the suites; architectures depend on mlx and mlx-lm alone, and take an hour."""
    is_new = any(newest[package] != pins[package] for package in ("mlx", "mlx-lm"))
    return [suite for suite in SUITES if is_new or not isinstance(suite, Architectures)]


def paths(page: str) -> dict[str, str]:
    """Return the path of each architecture on a page of models, without the part on ranks."""
    table = page.partition("## Over ranks")[0]
    cells = re.findall(r"^\| (\w+) \| ([^|]*) \|", table, re.MULTILINE)
    return {name: path for name, path in cells if name != "architecture"}


def pinned() -> dict[str, str]:
    """Return the pinned versions of the packages."""
    files = ("base.txt", "linux-cpu.txt", "darwin.txt")
    text = "\n".join((ROOT / "requirements" / file).read_text() for file in files)
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE))


def installed(package: str) -> str:
    """Return the version of a package in the environment of the newest ones."""
    program = f"import importlib.metadata as m; print(m.version({package!r}))"
    command = [str(PYTHON), "-c", program]
    done = child_process.run([child_process.COMMAND, *command], stdout=-1, text=True)
    return str(done.stdout).strip() or "not installed"


def section(ran: dict[str, list[Outcome]], newest: dict[str, str], pins: dict[str, str]) -> str:
    """Return the section of the page."""
    lines = ["| package | pinned | newest |", "|---|---|---|"]
    lines += [f"| {name} | {pins[name]} | {version} |" for name, version in newest.items()]
    lines += ["", "| what | passed | failed | which failed |", "|---|---|---|---|"]
    for name, tests in ran.items():
        failed = [test.name for test in tests if test.result == "failed"]
        passed = sum(test.result == "passed" for test in tests)
        lines.append(f"| {name} | {passed} | {len(failed)} | {_listed(failed)} |")
    return "\n".join([INTRODUCTION, last_run(), *lines])


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:LISTED]) or "none"
    return shown + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")


def main(words: list[str], page: Path = PAGE) -> int:
    """Return the exit status."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    newest = {package: installed(package) for package in PACKAGES}
    if "not installed" in newest.values():
        print(f"{PYTHON} lacks a package: {newest}", file=sys.stderr)
        return 1
    pins = pinned()
    ran = {suite.name: suite.run() for suite in choose(suites_for(newest, pins), words)}
    text = section(ran, newest, pins)
    print(text)
    if not words:
        page.write_text(with_section(page.read_text(), NEWEST, text))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
