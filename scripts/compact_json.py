"""JSON that is read by people: what fits into a line stands in one."""

from __future__ import annotations

import json
import textwrap
from typing import Any

INDENT = "  "


def compact_json(value: Any, *, width: int = 96, before: str = "") -> str:
    """Return a value as JSON whose objects and lists are in one line where that is short.

    Args:
        value: of JSON.
        width: the most characters of a line, as far as texts allow it.
        before: the indentation of the line that it begins in.
    """
    line = json.dumps(value, ensure_ascii=False)
    if len(before) + len(line) <= width or not isinstance(value, dict | list) or not value:
        return line
    inner = before + INDENT
    if isinstance(value, dict):
        names = (json.dumps(key, ensure_ascii=False) for key in value)
        values = (compact_json(item, width=width, before=inner) for item in value.values())
        items = [f"{name}: {text}" for name, text in zip(names, values, strict=True)]
    elif all(isinstance(item, int | float) for item in value):
        filled = textwrap.fill(line[1:-1], width=width - len(inner), break_on_hyphens=False)
        items = [textwrap.indent(filled, inner).strip()]
    else:
        items = [compact_json(item, width=width, before=inner) for item in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    lines = f",\n{inner}".join(items)
    return f"{opening}\n{inner}{lines}\n{before}{closing}"
