"""Check that comments and docstrings are sentences, and that names say roles.

    python scripts/check_language.py [FILE …]

Without files, all Python files of the repository are checked. The exit status is 1 if there are
faults, and each has a line with its place.
"""

from __future__ import annotations

import argparse
import ast
import gc
import io
import os
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_FOLDERS = ("benchmarks", "demo", "examples", "loadtests", "mlx_parallm", "scripts", "tests")

_FRAGMENT = re.compile(r"(Of|Not|First|The same)\b(?! time\b)")
# A docstring says what is returned or done, in words such as "Return" and "True if".
_NO_FIRST_WORD = re.compile(r"(What|Whether|Whose|How|\.\.\.)\b")
# A function's docstring begins with a verb; a property's may name the value.
_NO_VERB = re.compile(r"(A|An|The|Why|When|Where|So|As|All|It|They)\b")
_EMPTY = re.compile(r"[\s.…]*")
# The field says evict, apply, notify, delete, report. Code in a sentence (``tell``) has any names.
_PRIVATE_WORDS = re.compile(
    r"(?<![\w`.])(heed\w*|(mak(e|es|ing)|made) way|put away|whoever|tells?|told)\b", re.I
)
_SENTENCE_END = re.compile(r"(?<=[a-z0-9)`\"'][.?!])(?<!e\.g\.)(?<!i\.e\.)\s+(?=[A-Z])")
_NAMES_WITHOUT_ROLE = frozenset({"one", "found", "given", "asked", "told", "whose"})


def sentences(text: str) -> list[str]:
    """Return the sentences of a text."""
    return _SENTENCE_END.split(" ".join(text.split()))


def fragments(text: str) -> list[str]:
    """Return the sentences that begin as fragments do, or have words of a private language."""
    return [
        sentence
        for sentence in sentences(text)
        if _FRAGMENT.match(sentence) or _PRIVATE_WORDS.search(sentence)
    ]


def comment_blocks(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of comments; those on successive lines are one text."""
    block: list[str] = []
    start = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        if block and line != last + 1:
            yield start, " ".join(block)
            block = []
        start = start if block else line
        block.append(token.string.lstrip("#: "))
        last = line
    if block:
        yield start, " ".join(block)


def comment_faults(source: str) -> Iterator[str]:
    """Yield the faults of a file's comments."""
    for line, text in comment_blocks(source):
        for sentence in fragments(text):
            yield f"{line}: a comment has {sentence[:50]!r}"


def docstring_faults(node: ast.Expr) -> Iterator[str]:
    """Yield the faults of a docstring."""
    match node:
        case ast.Expr(value=ast.Constant(value=str(text)), lineno=line):
            text = text.strip()
        case _:
            return
    if _EMPTY.fullmatch(text):
        yield f"{line}: an empty docstring"
    if _NO_FIRST_WORD.match(text):
        yield f"{line}: a docstring begins {text[:50]!r}"
    for sentence in fragments(text):
        yield f"{line}: a docstring has {sentence[:50]!r}"


def function_faults(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Yield a fault if a function's docstring does not begin with a verb."""
    text = ast.get_docstring(node) or ""
    if not _NO_VERB.match(text):
        return
    decorators = {ast.unparse(by) for by in node.decorator_list}
    # The method that is overridden has the sentence; here is what differs.
    if not any("property" in by or by == "override" for by in decorators):
        yield f"{node.lineno}: a function's docstring begins {text[:50]!r}"


def name_faults(node: ast.Name | ast.arg) -> Iterator[str]:
    """Yield a fault if a variable's name says no role."""
    if isinstance(node, ast.arg):
        name = node.arg
    elif isinstance(node.ctx, ast.Store):
        name = node.id
    else:
        return
    if name.lstrip("_") in _NAMES_WITHOUT_ROLE:
        yield f"{node.lineno}: a variable is named {name!r}"


_CHECKS: dict[type[ast.AST], Callable[[Any], Iterator[str]]] = {
    ast.Expr: docstring_faults,
    ast.FunctionDef: function_faults,
    ast.AsyncFunctionDef: function_faults,
    ast.Name: name_faults,
    ast.arg: name_faults,
}


def faults(source: str) -> list[str]:
    """Return all faults of a file."""
    lines = list(comment_faults(source))
    for node in ast.walk(ast.parse(source)):
        if check := _CHECKS.get(type(node)):
            lines += check(node)
    return lines


def repository_files() -> list[Path]:
    """Return the Python files of the repository, without those of packages for Node."""
    files = (path for folder in _FOLDERS for path in (_ROOT / folder).rglob("*.py"))
    return sorted(path for path in files if "node_modules" not in path.parts)


def main() -> int:
    """Print the faults of the files; return 1 if there are any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    files = parser.parse_args().files or repository_files()
    # Syntax trees have no cycles, so the collector would walk through them for nothing.
    gc.disable()
    lines = [
        f"{os.path.relpath(path)}:{fault}"
        for path in files
        for fault in faults(path.read_text(encoding="utf-8"))
    ]
    for line in lines:
        print(line)
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main())
