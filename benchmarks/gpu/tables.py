"""The Markdown tables of the results, between the marks of ``benchmarks/results/gpu.md``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from benchmarks.figures import PAGES, replace_marked
from benchmarks.gpu.bench import Row
from benchmarks.gpu.store import why_incomplete

Record = Mapping[str, Any]
PAGE = PAGES / "gpu.md"


def write_tables(rows: Sequence[Row], records: Mapping[str, Record], page: Path = PAGE) -> None:
    """Put every table into the page."""
    text = page.read_text()
    for name in dict.fromkeys(row.table for row in rows):
        own_rows = [row for row in rows if row.table == name]
        text = replace_marked(text, f"gpu: {name}", format_table(own_rows, records))
    page.write_text(text)


def format_table(rows: Sequence[Row], records: Mapping[str, Record]) -> str:
    """Return a table with a line per figure, blank if nothing was measured.

    Below it stand the rows that failed and where the figures come from: one line if all come from
    the same place, else one per letter in the last column.
    """
    measured = {
        row.name: records[row.name] for row in rows if "values" in records.get(row.name, {})
    }
    columns = list(dict.fromkeys(key for entry in measured.values() for key in entry["figures"]))
    places = list(dict.fromkeys(_place(entry) for entry in measured.values()))
    letters = dict(zip(places, ascii_lowercase, strict=False)) if len(places) > 1 else {}
    lines = [line for row in rows for line in _lines(row, measured.get(row.name), columns, letters)]
    header = ["what", *columns, "figure", "measured", "target", *["", "run"][: 1 + bool(letters)]]
    table = "\n".join([_cells(header), "|---" * len(header) + "|", *map(_cells, lines)])
    notes = [
        f"Not measured: {row.what} ({reason})."
        for row in rows
        for reason in why_incomplete(records.get(row.name, {})).splitlines()[:1]
    ]
    about = [f"{letters[place]}: {place}" if letters else place for place in places]
    return "\n\n".join([table, *notes, *about]) + "\n"


def _lines(
    row: Row, record: Record | None, columns: Sequence[str], letters: Mapping[str, str]
) -> list[list[str]]:
    """Return the cells of a row; only its first line has its name and figures."""
    values, figures = (record["values"], record["figures"]) if record else ({}, {})
    first = [row.what, *(_number(figures.get(column)) for column in columns)]
    lines = []
    for index, target in enumerate(row.targets):
        value = values.get(target.what)
        limit = "" if target.limit is None else f"{target.relation} {target.limit:g}"
        verdict = "" if value is None else target.check(value).verdict
        cells = [*(first if index == 0 else [""] * len(first)), target.what, _number(value)]
        lines.append([*cells, limit, verdict])
    if not row.targets:
        lines = [[*first, "", "", "", ""]]
    run = [letters[_place(record)] if record else ""] if letters else []
    return [line + run for line in lines]


def _place(record: Record) -> str:
    machine = record["machine"]
    settings = "".join(f", `{key}={value}`" for key, value in record["environment"].items())
    return (
        f"{machine['time'][:10]}, commit {machine['commit']}, {machine['device']}, "
        f"mlx {machine['mlx']}, mlx-lm {machine['mlx_lm']}{settings}."
    )


def _cells(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
