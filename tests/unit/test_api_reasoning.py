"""Splitting reasoning from content, however the text is cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.api.reasoning import ReasoningSplitter


def split(pieces: list[str], *, is_open: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter("<think>", "</think>", is_open=is_open)
    parts = [*(splitter.add(piece) for piece in pieces), splitter.flush()]
    return "".join(p[0] for p in parts), "".join(p[1] for p in parts)


@given(
    cuts=st.lists(st.integers(0, 40)),
    reasoning=st.sampled_from(["a b", "2 < 3\nso", "<", "</thin", ""]),
    content=st.sampled_from(["answer", "x </think> y", ""]),
)
def test_cuts_change_nothing(cuts: list[int], reasoning: str, content: str) -> None:
    text = f"\n<think>\n{reasoning}\n</think>\n\n{content}"
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in pairwise(places)]
    assert split(pieces) == (reasoning, content)


def test_text_without_a_marker_is_content() -> None:
    assert split(["\n hello ", "<think>"]) == ("", "\n hello <think>")
    assert split(["<thi", "s is no marker"]) == ("", "<this is no marker")


def test_the_template_may_have_opened_the_reasoning() -> None:
    assert split(["so ", "it is</th", "ink>yes"], is_open=True) == ("so it is", "yes")


def test_reasoning_that_never_ends_is_all_reasoning() -> None:
    assert split(["<think>on and ", "on </"]) == ("on and on </", "")
