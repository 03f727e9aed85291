"""Links between the pages of the documentation, and which of them lead nowhere."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

FENCED = re.compile(r"^[ \t]*```.*?^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#+ +(.*?)\s*$", re.MULTILINE)
LINK = re.compile(r"\]\(([^()\s]+)\)|<(?:img|a)\b[^>]*?\b(?:src|href)=\"([^\"]+)\"")
ELSEWHERE = re.compile(r"[a-z]+:|//")


def anchor(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    kept = (letter for letter in heading.lower() if letter.isalnum() or letter in " -_")
    return "".join(kept).replace(" ", "-")


def anchors(text: str) -> set[str]:
    """Return the anchors of a page; headings of one name are numbered."""
    names = map(anchor, HEADING.findall(FENCED.sub("", text)))
    seen: Counter[str] = Counter()
    numbered = set[str]()
    for name in names:
        numbered.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return numbered


def broken_links(page: Path, text: str) -> Iterator[str]:
    """Yield the links of a page to files and headings that do not exist."""
    for match in LINK.finditer(FENCED.sub("", text)):
        link = match[1] or match[2]
        if ELSEWHERE.match(link):
            continue
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists():
            yield link
        elif heading and target.suffix == ".md":
            content = text if target == page else target.read_text(encoding="utf-8")
            if heading not in anchors(content):
                yield link
