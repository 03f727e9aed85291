"""docs/compatibility.md: unmodified clients, and then sections that other runs write."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "compatibility.md"
TRAINERS = "## Trainers"
CORPUS = "## What others wrote"
NEWEST = "## Newer versions"
#: The sections behind the clients' part, in order.
SECTIONS = (TRAINERS, CORPUS, NEWEST)


def with_clients(page: str, text: str) -> str:
    """Return the page with another text before all sections."""
    _, sections = _split(page)
    return _joined(text, sections)


def with_section(page: str, heading: str, text: str) -> str:
    """Return the page with another text below a heading of ``SECTIONS``, or with it added."""
    clients, sections = _split(page)
    return _joined(clients, sections | {heading: text})


def section(page: str, heading: str) -> str:
    """Return the text below a heading; an empty text if the page has no such section."""
    return _split(page)[1].get(heading, "")


def _split(page: str) -> tuple[str, dict[str, str]]:
    """Return the clients' part, and the text of each section there is."""
    pattern = "|".join(map(re.escape, SECTIONS))
    clients, *rest = re.split(rf"^({pattern})$", page, flags=re.MULTILINE)
    return clients, dict(zip(rest[::2], rest[1::2], strict=True))


def _joined(clients: str, sections: dict[str, str]) -> str:
    texts = [f"{name}\n\n{sections[name].strip()}" for name in SECTIONS if name in sections]
    return "\n\n".join([clients.strip(), *texts]) + "\n"
