"""The code lines of a checkout's package by folder: no blanks, comments, docstrings or imports.

    python scripts/count_code.py /path/to/checkout
    python scripts/count_code.py /path/to/checkout engine generation pooling serving api

With folders, or modules, of the package named, only those are counted, and together.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

PACKAGE = "mlx_parallm"
NO_CODE = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
)
WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def main() -> None:
    """Print a line for each folder, and their sum."""
    parser = argparse.ArgumentParser(description="Count code lines by folder of the package.")
    parser.add_argument("tree", type=Path, help="a checkout")
    parser.add_argument("parts", nargs="*", help="folders of the package; all if none is named")
    args = parser.parse_args()
    counts = by_part(args.tree / PACKAGE)
    shown = {part: counts[part] for part in (args.parts or sorted(counts))}
    for part, count in {**shown, "together": sum(shown.values())}.items():
        print(f"{count:>7,}  {part}")


def by_part(package: Path) -> Counter[str]:
    """Return the code lines of each folder and each module directly below a package."""
    counts: Counter[str] = Counter()
    for path in package.rglob("*.py"):
        part = path.relative_to(package).parts[0].removesuffix(".py")
        counts[part] += code_lines(path.read_text(encoding="utf-8"))
    return counts


def code_lines(source: str) -> int:
    """Return how many lines of a module hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        left_out = [node] if isinstance(node, ast.Import | ast.ImportFrom) else _docstring_of(node)
        for statement in left_out:
            end = statement.end_lineno or statement.lineno
            lines.difference_update(range(statement.lineno, end + 1))
    return len(lines)


def _docstring_of(node: ast.AST) -> list[ast.stmt]:
    """Return the statement that is a node's docstring, if it has one."""
    if isinstance(node, WITH_DOCSTRING) and ast.get_docstring(node) is not None:
        return node.body[:1]
    return []


if __name__ == "__main__":
    main()
