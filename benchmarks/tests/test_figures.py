"""The record of measurements: pages, their tables, and the index of these."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import figures
from benchmarks.figures import INDEX, indexed, main, pages, tables
from benchmarks.gpu.__main__ import PUBLISHED
from benchmarks.gpu.rows import all_rows
from benchmarks.gpu.tables import PAGE, write_tables
from scripts.markdown_links import HEADING, anchor

ROOT = Path(__file__).parents[2]
# CLAIM: a row of a table whose last links lead to the section of the record that has its numbers.
CLAIM = re.compile(r"^\| (?P<what>.*) \| [^|]*\]\([./]*benchmarks/results/(?P<link>[^)]+)\) \|$")
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w.]*\d)")


def test_the_index_lists_what_the_pages_have() -> None:
    text = INDEX.read_text()
    assert text == indexed(text, tables()), "run: python -m benchmarks.figures"
    assert all(f"]({page.name})" in text for page in pages())
    names = [table.name for table in tables()]
    assert len(names) == len(set(names)) >= 49
    assert all(table.dates and table.machines for table in tables())


def test_the_page_of_the_gpu_has_the_published_figures(tmp_path: Path) -> None:
    page = tmp_path / PAGE.name
    page.write_text(PAGE.read_text())
    write_tables(all_rows(), json.loads(PUBLISHED.read_text())["rows"], page)
    assert page.read_text() == PAGE.read_text()


def test_a_result_goes_between_its_marks_and_into_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.md").write_text("# A b!\n\n<!-- figures: fast -->\nold\n<!-- end -->\nrest\n")
    (tmp_path / "README.md").write_text(
        "<!-- index -->\n<!-- end -->\n<!-- missed -->\nold\n<!-- end -->\n"
    )
    checks = [
        {"what": "slow", "value": 2.0, "relation": "<=", "limit": 1, "verdict": "FAIL"},
        {"what": "good", "value": 0.123456, "relation": "<=", "limit": 1, "verdict": "PASS"},
        {"what": "note", "value": None, "relation": ">=", "limit": None, "verdict": ""},
    ]
    machine = {"time": "2030-01-02T03", "commit": "abc", "cores": 2, "processor": "X", "mlx": "1"}
    content = {"machine": {**machine, "mlx_lm": "2"}, "checks": checks}
    results = tmp_path / "results"
    results.mkdir()
    (results / "fast.json").write_text(json.dumps(content))
    (results / "other.json").write_text("{}")
    monkeypatch.setattr(figures, "PAGES", tmp_path)
    monkeypatch.setattr(figures, "INDEX", tmp_path / "README.md")
    monkeypatch.setattr(figures, "RESULTS", results)
    main()
    page = (tmp_path / "a.md").read_text()
    assert "| slow | 2 | <= 1 | FAIL |\n| good | 0.1235 | <= 1 | PASS |\n| note | none |" in page
    assert page.endswith("<!-- end -->\nrest\n")
    assert "old" not in page
    index = (tmp_path / "README.md").read_text()
    assert "| [`fast`](a.md#a-b) | 2030-01-02 | 2 cores of X | 1 of 2 |" in index
    assert "| [`fast`](a.md#a-b) | slow | 2 | <= 1 |\n<!-- end -->" in index
    assert "old" not in index


def sections(page: Path) -> dict[str, str]:
    """Return the text below each heading of a page, by anchor; the page's own includes all."""
    text = page.read_text()
    starts = [match.start() for match in HEADING.finditer(text)]
    parts = [text[i:j] for i, j in zip(starts, [*starts[1:], len(text)], strict=True)]
    return {"": text} | {anchor(HEADING.findall(part)[0]): part for part in parts}


def numbers(text: str) -> list[str]:
    return [number.replace(",", "") for number in NUMBER.findall(text)]


def is_in(text: str, number: str) -> bool:
    """True if a number of the text rounds to this one."""
    step = 10 ** -len(number.partition(".")[2]) / 2 * 1.0001
    return any(abs(float(value) - float(number)) <= step for value in numbers(text))


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_headline_figures_are_those_of_the_record(page: str) -> None:
    claims = list(filter(None, map(CLAIM.match, (ROOT / page).read_text().splitlines())))
    assert len(claims) >= 8
    for claim in claims:
        name, _, heading = claim["link"].partition("#")
        section = sections(INDEX.parent / name)[heading]
        for number in numbers(claim["what"].split("|", 1)[1]):
            assert is_in(section, number), (number, claim[0])


def test_what_the_page_says_is_slow_is_in_the_record() -> None:
    text = (ROOT / "docs/performance.md").read_text()
    items = text.partition("## What is slow")[2].partition("\n\nThe record")[0].split("\n- ")[1:]
    assert len(items) >= 8
    for item in items:
        (name,) = re.findall(r"benchmarks/results/([\w-]+\.md)", item)
        record = (INDEX.parent / name).read_text()
        for number in re.findall(r"\b\d+\.\d+\b", item):
            assert is_in(record, number), (number, item)
