"""Reads the code blocks of a Markdown page and runs them as a reader would.

A comment before a block, with nothing but blank lines between, says how it is treated:

* ``<!-- not run: REASON -->``: the block cannot run beside the embedded models.
* ``<!-- output -->``: the block is what the block before it prints. ``…`` stands for any text.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mlx_parallm.peers import child_process
from tests.server_process import ROOT

ADDRESS = re.compile(r"(127\.0\.0\.1|localhost):8000")
#: Text that no interpreter reads.
PLAIN_LANGUAGES = frozenset({"text", "caddy", "ini", "nginx", "xml"})
ANY_TEXT = "…"
#: Each curl of a block fails on an HTTP error and ends its output with a line break.
CURL_SETTINGS = 'fail-with-body\nsilent\nshow-error\nnoproxy = "*"\nwrite-out = "\\n"\n'


class BlockError(AssertionError):
    """A block of the documentation does not do what the page says."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of code.

    Attributes:
        page: path of the page, relative to the repository.
        line: line of the opening fence, from 1.
        language: the word behind the fence.
        text: the code, without the indentation of the fence.
        note: the content of the comment directly before the fence.
    """

    page: str
    line: int
    language: str
    text: str
    note: str = ""

    @property
    def place(self) -> str:
        """Return where the block stands, for messages."""
        return f"{self.page}:{self.line}"

    @property
    def reason(self) -> str | None:
        """Return why the block is not run, or None if it is to run."""
        match = re.fullmatch(r"not run:\s*(.*)", self.note, re.DOTALL)
        return match[1].strip() if match else None

    @property
    def is_output(self) -> bool:
        """True if the block is what the block before it prints."""
        return self.note == "output"


def read_blocks(page: str, text: str) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    fence = re.compile(
        r"(?:<!--\s*(?P<note>(?:(?!-->).)*?)\s*-->\s*\n)?"
        r"^(?P<indent>[ \t]*)```(?P<language>[^\n`]*)\n(?P<text>.*?)^[ \t]*```[ \t]*$",
        re.DOTALL | re.MULTILINE,
    )
    blocks = []
    for match in fence.finditer(text):
        line = text.count("\n", 0, match.start("language")) + 1
        code = re.sub(f"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
        blocks.append(Block(page, line, match["language"].strip(), code, match["note"] or ""))
    return blocks


def indented_code(text: str) -> list[int]:
    """Return the lines that begin code marked by indentation alone, which names no language."""
    without_fences = re.sub(
        r"```.*?```", lambda fenced: "\n" * fenced[0].count("\n"), text, flags=re.DOTALL
    )
    pairs = enumerate(itertools.pairwise(without_fences.split("\n")), start=2)
    return [number for number, (before, line) in pairs if not before and line.startswith("    ")]


def matches(expected: str, actual: str) -> bool:
    """True if the texts are equal up to white space at line ends and what ``…`` stands for."""
    parts = [re.escape(part) for part in _tidy(expected).split(ANY_TEXT)]
    return re.fullmatch(".*?".join(parts), _tidy(actual), re.DOTALL) is not None


def contains_json(expected: Any, actual: Any) -> bool:
    """True if every field that is expected is there; numbers may differ by 1 %."""
    if isinstance(expected, dict):
        return isinstance(actual, dict) and all(
            key in actual and contains_json(value, actual[key]) for key, value in expected.items()
        )
    if isinstance(expected, list):
        pairs = zip(expected, actual, strict=False) if isinstance(actual, list) else ()
        return len(expected) == len(actual) and all(contains_json(*pair) for pair in pairs)
    if isinstance(expected, str):
        return isinstance(actual, str) and matches(expected, actual)
    if isinstance(expected, float) and isinstance(actual, float):
        return abs(expected - actual) <= 0.01 * max(abs(expected), 0.01)
    return expected == actual


def _tidy(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


@dataclass(slots=True)
class PageRunner:
    """Runs the blocks of one page in order, in one namespace and one folder.

    Attributes:
        port: of the server that stands for the one at port 8000.
        folder: what the blocks take for the reader's folder.
        served: the models of that server.
    """

    port: int
    folder: Path
    served: frozenset[str]
    _names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    _output: str | None = None

    def run_page(self, blocks: list[Block]) -> None:
        """Run the blocks.

        Raises:
            BlockError: a block fails, prints something else than the page says, or is neither
                run nor marked.
        """
        with contextlib.chdir(self.folder):
            for block in blocks:
                self._handle(block)

    def _handle(self, block: Block) -> None:
        if block.note and block.reason is None and not block.is_output:
            raise BlockError(f"{block.place}: what does {block.note!r} before the block mean?")
        if block.reason is not None:
            _check_reason(block)
            self._output = None
        elif block.is_output:
            self._check_output(block)
        elif block.language == "python":
            self._output = self._run_python(block)
        elif block.language == "sh":
            self._output = self._run_shell(block)
        else:
            _check_text(block)

    def _check_output(self, block: Block) -> None:
        if self._output is None:
            raise BlockError(f"{block.place}: there is no block before this one that prints")
        if block.language == "json":
            is_right = contains_json(json.loads(block.text), json.loads(self._output))
        else:
            is_right = matches(block.text, self._output)
        if not is_right:
            raise BlockError(f"{block.place}: the block before prints\n{self._output}")

    def _run_python(self, block: Block) -> str:
        source = self._here(block.text)
        printed = PrintRecorder()
        self._names["print"] = printed
        try:
            tree = ast.parse(source)
            exec(compile(tree, block.place, "exec", dont_inherit=True), self._names)
        except Exception as error:
            raise BlockError(f"{block.place}: {type(error).__name__}: {error}") from error
        _check_comments(block, tree, source, printed)
        return printed.text

    def _run_shell(self, block: Block) -> str:
        commands = self._here(block.text)
        served = [line for line in _commands(commands) if line.startswith("mlx_parallm serve")]
        if served:
            if served != _commands(commands):
                raise BlockError(f"{block.place}: put the command that serves into its own block")
            self._check_served(block, served)
            return ""
        (self.folder / ".curlrc").write_text(CURL_SETTINGS)
        done = child_process.run(
            [child_process.COMMAND, "bash", "-e", "-o", "pipefail", "-c", commands],
            cwd=self.folder,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            raise BlockError(
                f"{block.place}: status {done.returncode}\n{done.stdout}\n{done.stderr}"
            )
        return done.stdout

    def _check_served(self, block: Block, commands: list[str]) -> None:
        """Check that the test's server is the one that these commands would start."""
        for command in commands:
            words = shlex.split(command, comments=True)[2:]
            models = {word for word in words if word != "--model"}
            if unknown := models - self.served:
                raise BlockError(f"{block.place}: the test's server does not have {unknown}")

    def _environment(self) -> Mapping[str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return {**os.environ, "CURL_HOME": str(self.folder), "PATH": path, "PYTHONPATH": str(ROOT)}

    def _here(self, text: str) -> str:
        return ADDRESS.sub(rf"\1:{self.port}", text)


class PrintRecorder:
    """Stands for ``print``, and keeps what each line of the code printed."""

    def __init__(self) -> None:
        self.text = ""
        self.by_line: dict[int, str] = {}

    def __call__(self, *values: object, **options: Any) -> None:
        buffer = io.StringIO()
        print(*values, **{**options, "file": buffer})  # noqa: T201
        frame = inspect.currentframe()
        line = frame.f_back.f_lineno if frame and frame.f_back else 0
        self.text += buffer.getvalue()
        self.by_line[line] = self.by_line.get(line, "") + buffer.getvalue()


def _check_comments(block: Block, tree: ast.AST, source: str, printed: PrintRecorder) -> None:
    """Compare what each ``print(…)  # text`` prints with its comment."""
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"):
            continue
        expected = comments.get(node.end_lineno or 0)
        lines = range(node.lineno, (node.end_lineno or 0) + 1)
        actual = "".join(printed.by_line.get(line, "") for line in lines)
        if expected is not None and not matches(expected, actual):
            raise BlockError(f"{block.place}: print in line {node.lineno} gives {actual!r}")


def _check_reason(block: Block) -> None:
    if len(block.reason or "") < len("needs a hub"):
        raise BlockError(f"{block.place}: give the reader a reason")


def script_faults(block: Block) -> list[str]:
    """Return what keeps a reader from running a block as a script, whether the test runs it or not.

    That is syntax which scripts do not have, such as ``await`` outside a function.
    """
    if block.language != "python":
        return []
    try:
        compile(block.text, block.place, "exec", dont_inherit=True)
    except SyntaxError as error:
        return [f"{block.place}: line {error.lineno}: {error.msg}"]
    return []


def imported_modules(block: Block) -> set[str]:
    """Return the top-level modules that a block of Python imports."""
    if block.language != "python" or script_faults(block):
        return set()
    modules = set[str]()
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module.partition(".")[0])
    return modules


def _check_text(block: Block) -> None:
    """Parse data; refuse what nothing here reads or runs."""
    parsers = {"json": json.loads, "yaml": yaml.safe_load, "toml": tomllib.loads}
    if block.language in PLAIN_LANGUAGES:
        return
    if block.language not in parsers:
        raise BlockError(
            f"{block.place}: a block of {block.language or 'no language'} is neither run nor "
            "marked; write <!-- not run: REASON --> before it"
        )
    try:
        parsers[block.language](block.text)
    except (ValueError, yaml.YAMLError) as error:
        raise BlockError(f"{block.place}: {error}") from error


def _commands(text: str) -> list[str]:
    """Return the commands of a shell block, continued lines joined."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
