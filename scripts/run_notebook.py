"""A runner of a notebook's cells in order, without Jupyter.

    python scripts/run_notebook.py NOTEBOOK [--store]

With ``--store`` the outputs are written into the notebook (format 4.5 of
https://nbformat.readthedocs.io); otherwise it only fails if a cell does. Cells are plain Python:
no magics and no top-level await.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

Cell = dict[str, Any]


class CellError(Exception):
    """The error of a cell that failed; its cause is the cell's exception."""


def run(notebook: dict[str, Any]) -> None:
    """Run every code cell in a common namespace, and store its output in the cell.

    Raises:
        CellError: a cell raised; the cells after it did not run.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        source = "".join(cell["source"])
        try:
            cell["outputs"] = _run_cell(source, number, namespace)
        except Exception as cause:
            raise CellError(f"cell {number} failed: {cause!r}\n{source}") from cause
        cell["execution_count"] = number


def _run_cell(source: str, number: int, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the outputs of a cell: its printed text, and the value of its last line."""
    body = ast.parse(source).body
    last = None
    if body and isinstance(body[-1], ast.Expr):
        last = ast.Expression(body[-1].value)
        del body[-1]
    name = f"<cell {number}>"
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), name, "exec"), namespace)
        if last is not None:
            value = eval(compile(last, name, "eval"), namespace)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(printed)})
    if value is not None:
        outputs.append(
            {
                "data": {"text/plain": _lines(io.StringIO(repr(value)))},
                "execution_count": number,
                "metadata": {},
                "output_type": "execute_result",
            }
        )
    return outputs


def _lines(text: io.StringIO) -> list[str]:
    return text.getvalue().splitlines(keepends=True)


def main() -> None:
    """Run the notebook of the command line."""
    parser = argparse.ArgumentParser(description="Run the cells of a notebook.")
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--store", action="store_true", help="write the outputs into it")
    options = parser.parse_args()
    notebook = json.loads(options.notebook.read_text(encoding="utf-8"))
    run(notebook)
    if options.store:
        text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        options.notebook.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{options.notebook}: every cell ran\n")


if __name__ == "__main__":
    main()
