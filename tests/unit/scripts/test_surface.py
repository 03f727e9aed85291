"""Scripts count a checkout's lines of code, and list its public surface."""

from __future__ import annotations

from scripts.count_code import code_lines
from scripts.public_surface import leaves, metric_lines

MODULE = '''"""A module's docstring
of two lines."""

import os
from os import (
    path,
)

# A comment.
TEXT = """two
lines"""


def double(x: int) -> int:
    """Return twice ``x``."""
    return (
        2 * x  # with a comment
    )
'''


def test_only_lines_of_code_count() -> None:
    assert code_lines(MODULE) == 2 + 4
    assert code_lines("") == 0


def test_a_leaf_is_a_line() -> None:
    document = {"a": {"b": [1, {"c": "ü"}], "d": {}}}

    assert list(leaves(document)) == ["a.b[0] = 1", 'a.b[1].c = "ü"', "a.d = {}"]


def test_series_lose_their_values() -> None:
    text = '# TYPE x counter\nx_total{model="m",a="b c"} 3.0\ny 1.0\n'

    assert list(metric_lines(text)) == ["# TYPE x counter", "x_total{a,model}", "y{}"]
