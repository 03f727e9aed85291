"""Every link of the documentation leads to a file and a heading that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.markdown_links import anchors, broken_links
from tests.server_process import ROOT

# FOLDERS: those whose texts name pages.
FOLDERS = ("docs", "mlx_parallm", "demo", "scripts", "examples", "tests", "benchmarks", "loadtests")
IGNORED = {"node_modules", "__pycache__", "build", "dist"}
# ELSEWHERE: pages of other projects.
ELSEWHERE = {"docs/sglang-integration.md"}
NAMED = re.compile(r"(?<![\w./-])((?:docs|benchmarks/results)/[\w/-]+\.md)(?:#([\w-]+))?")


# PATH: a file of code, or a folder, in a page.
PATH = re.compile(r"`(?:\.\./)*((?:[\w.-]+/)*[\w-]+\.(?:py|metal|cu)|(?:[\w-]+/)+)`")
# NOT_PRESENT: pages that name files of other projects, or as they were once.
NOT_PRESENT = {"docs/compatibility.md", "docs/decisions", "CHANGELOG.md"}


def files(*suffixes: str) -> list[Path]:
    """Return the project's files with one of these suffixes."""
    paths = [file for file in ROOT.iterdir() if file.suffix in suffixes]
    for folder in FOLDERS:
        paths += [
            file
            for file in (ROOT / folder).rglob("*")
            if file.suffix in suffixes and not IGNORED & set(file.relative_to(ROOT).parts)
        ]
    return sorted(paths)


def pages() -> Iterator[tuple[Path, str]]:
    """Yield every page with its text; that of a notebook is its Markdown cells."""
    for file in files(".md", ".ipynb"):
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".ipynb":
            cells = json.loads(text)["cells"]
            text = "\n\n".join(
                "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
            )
        yield file, text


def test_every_link_of_every_page_leads_somewhere() -> None:
    broken = [
        (str(page.relative_to(ROOT)), link)
        for page, text in pages()
        for link in broken_links(page, text)
    ]
    assert broken == []


def test_every_page_that_code_names_exists() -> None:
    named = {
        (str(file.relative_to(ROOT)), path, heading)
        for file in files(".py", ".md", ".toml", ".yaml", ".js", ".html", ".ipynb")
        for path, heading in NAMED.findall(file.read_text(encoding="utf-8"))
        if path not in ELSEWHERE
    }
    assert len(named) > 20
    missing = [
        (file, path, heading)
        for file, path, heading in sorted(named)
        if not (ROOT / path).exists()
        or (heading and heading not in anchors((ROOT / path).read_text(encoding="utf-8")))
    ]
    assert missing == []


def ends_of_paths() -> set[str]:
    """Return the ends of the paths of all files, and of all folders with a slash."""
    ends = set[str]()
    for file in (*files(".py", ".metal", ".cu", ".md"), *ROOT.glob("requirements/*")):
        parts = file.relative_to(ROOT).parts
        for begin in range(len(parts)):
            ends.add("/".join(parts[begin:]))
            ends |= {"/".join(parts[begin:end]) + "/" for end in range(begin + 1, len(parts))}
    return ends


def test_every_file_of_code_that_a_page_names_exists() -> None:
    ends = ends_of_paths()
    missing = [
        (name, path)
        for page, text in pages()
        if not NOT_PRESENT
        & {name := str(page.relative_to(ROOT)), str(page.parent.relative_to(ROOT))}
        for path in PATH.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        if path not in ends
    ]
    assert missing == []


def test_every_page_of_the_docs_is_in_an_index() -> None:
    for index in (ROOT / "docs/README.md", ROOT / "docs/decisions/README.md"):
        text = index.read_text(encoding="utf-8")
        unlisted = [
            page.name
            for page in index.parent.glob("*.md")
            if page != index and f"({page.name})" not in text
        ]
        assert unlisted == []


@pytest.mark.parametrize(
    ("link", "is_broken"),
    [
        ("[a](other.md)", False),
        ("[a](other.md#b-c_d-1)", False),
        ("[a](#here)", False),
        ("[a](https://example.org/x#y)", False),
        ('<img src="other.md" width="1">', False),
        ("[a](gone.md)", True),
        ("[a](other.md#b)", True),
        ("[a](#there)", True),
        ('<img src="gone.svg">', True),
        ("```sh\n[a](gone.md)\n```", False),
    ],
)
def test_a_broken_link_is_found(tmp_path: Path, link: str, is_broken: bool) -> None:
    (tmp_path / "other.md").write_text("# B: c_d\n\n## B, c_d?\n\n```sh\n# b\n```\n")
    page = tmp_path / "page.md"
    page.write_text(f"# Here\n\n{link}\n")
    assert bool(list(broken_links(page, page.read_text()))) == is_broken
