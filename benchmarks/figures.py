"""Put the figures of the latest runs into the pages of ``benchmarks/results``, and index them.

``python -m benchmarks.figures`` replaces what stands between ``<!-- figures: NAME -->`` and
``<!-- end -->`` by the table of ``results/NAME.json``, for every result there is. It also writes
the lists of all tables and of all missed targets in ``benchmarks/results/README.md``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.checks import RESULTS
from scripts.markdown_links import HEADING, anchor

PAGES = Path(__file__).with_name("results")
INDEX = PAGES / "README.md"
TABLE = re.compile(r"<!-- (?:figures|gpu): (?P<name>\S+) -->\n(?P<text>.*?)<!-- end -->", re.DOTALL)
PLACE = re.compile(
    r"(?:[a-z]: )?(?P<date>\d{4}-\d\d-\d\d), .*?(?P<machine>(?:\d+ cores of|NVIDIA) .*), mlx \d"
)


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured figure with a target."""

    what: str
    measured: str
    target: str
    is_met: bool


@dataclass(frozen=True, slots=True)
class Table:
    """A table between marks.

    Attributes:
        name: the mark's name.
        link: its page and section.
        figures: those with a target.
        dates: of its runs, without repetitions.
        machines: what they ran on, without repetitions.
    """

    name: str
    link: str
    figures: Sequence[Figure]
    dates: Sequence[str]
    machines: Sequence[str]


def main() -> None:
    results = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    for page in pages():
        text = page.read_text()
        for name, content in results.items():
            if "checks" in content:
                text = replace_marked(text, f"figures: {name}", format_result(content))
        page.write_text(text)
    write_index()


def write_index() -> None:
    """Write the lists of all tables and of all missed targets anew."""
    INDEX.write_text(indexed(INDEX.read_text(), tables()))


def pages() -> list[Path]:
    """Return the pages that have tables of figures."""
    return [page for page in sorted(PAGES.glob("*.md")) if page != INDEX]


def replace_marked(text: str, mark: str, table: str) -> str:
    """Return ``text`` with the table between ``<!-- MARK -->`` and the end, if it has them."""
    pattern = rf"(<!-- {re.escape(mark)} -->\n).*?(<!-- end -->)"
    return re.sub(pattern, lambda match: f"{match[1]}{table}{match[2]}", text, flags=re.DOTALL)


def format_result(content: dict[str, Any]) -> str:
    """Return one benchmark's figures as a Markdown table, with what they were measured on."""
    machine = content["machine"]
    rows = ["| what | measured | target | |", "|---|---|---|---|"]
    for check in content["checks"]:
        limit = check["limit"]
        target = "" if limit is None else f"{check['relation']} {limit:g}"
        value = "none" if check["value"] is None else f"{check['value']:.4g}"
        rows.append(f"| {check['what']} | {value} | {target} | {check['verdict']} |")
    about = (
        f"{machine['time'][:10]}, commit {machine['commit']}, {machine['cores']} cores of "
        f"{machine['processor']}, mlx {machine['mlx']}, mlx-lm {machine['mlx_lm']}."
    )
    return "\n".join([*rows, "", about, ""])


def tables() -> list[Table]:
    """Return the tables of all pages."""
    return [table for page in pages() for table in _tables_of(page.name, page.read_text())]


def indexed(text: str, tables: Sequence[Table]) -> str:
    """Return the text of the index with its two lists written anew."""
    text = replace_marked(text, "index", _list_of_tables(tables))
    return replace_marked(text, "missed", _list_of_missed(tables))


def _tables_of(page: str, text: str) -> Iterator[Table]:
    for match in TABLE.finditer(text):
        heading = HEADING.findall(text, 0, match.start())[-1]
        places = list(filter(None, map(PLACE.match, match["text"].splitlines())))
        yield Table(
            match["name"],
            f"{page}#{anchor(heading)}",
            list(_figures(match["text"])),
            sorted({place["date"] for place in places}),
            list(dict.fromkeys(place["machine"] for place in places)),
        )


def _figures(table: str) -> Iterator[Figure]:
    header, _, *rows = [_cells(line) for line in table.splitlines() if line.startswith("|")]
    measured = header.index("measured")
    row_name = ""
    for cells in rows:
        row_name = cells[0] or row_name
        what = row_name if measured == 1 else f"{row_name}: {cells[measured - 1]}"
        value, target, verdict = cells[measured : measured + 3]
        if verdict:
            yield Figure(what, value, target, verdict == "PASS")


def _list_of_tables(tables: Sequence[Table]) -> str:
    lines = ["| table | measured | on | targets met |", "|---|---|---|---|"]
    for table in tables:
        met, number = sum(figure.is_met for figure in table.figures), len(table.figures)
        share = f"{met} of {number}" if number else ""
        dates, machines = ", ".join(table.dates), "; ".join(table.machines)
        lines.append(f"| [`{table.name}`]({table.link}) | {dates} | {machines} | {share} |")
    return "\n".join(lines) + "\n"


def _list_of_missed(tables: Sequence[Table]) -> str:
    lines = ["| table | what | measured | target |", "|---|---|---|---|"]
    lines += [
        f"| [`{table.name}`]({table.link}) | {figure.what} | {figure.measured} | {figure.target} |"
        for table in tables
        for figure in table.figures
        if not figure.is_met
    ]
    return "\n".join(lines) + "\n"


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


if __name__ == "__main__":
    main()
