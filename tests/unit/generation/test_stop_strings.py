import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.generation.output_processor import StopStrings


def reference(text: str, stop: list[str]) -> tuple[int, str] | None:
    """Return where the first complete stop string begins, and which it is, by trying prefixes."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            longest = max(complete, key=len)
            return end - len(longest), longest
    return None


def pieces(text: str, cuts: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(borders)]


texts = st.text("ab", max_size=40) | st.text("ab\n🙂", max_size=30)
stops = st.lists(
    st.text("ab", min_size=3, max_size=7) | st.text("ab\n🙂", min_size=1, max_size=6),
    min_size=1,
    max_size=3,
)


@given(texts, stops, st.lists(st.integers(0, 99)), st.booleans())
def test_equals_the_reference_however_the_text_is_cut(text, stop, cuts, include):
    matcher = StopStrings(stop, include_in_output=include).matcher()
    out = ""
    for piece in pieces(text, cuts):
        out += matcher.add(piece)
        if matcher.matched is not None:
            break
    else:
        out += matcher.flush()
    expected = reference(text, stop)
    if expected is None:
        assert (out, matcher.matched) == (text, None)
    else:
        start, matched = expected
        assert matcher.matched == matched
        assert out == text[:start] + (matched if include else "")


@given(texts, stops)
def test_holds_back_exactly_what_may_become_a_stop_string(text, stop):
    if reference(text, stop) is not None:
        return
    matcher = StopStrings(stop).matcher()
    emitted = "".join(matcher.add(character) for character in text)
    held = text[len(emitted) :]
    suffixes = [text[i:] for i in range(len(text))]
    longest = next((s for s in suffixes if any(p.startswith(s) for p in stop)), "")
    assert held == longest


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("aaab", "aab", "a"),
        ("ababaca", "abaca", "ab"),
        ("abab", "abb", "abab"),
        ("aabaaabaaaa", "aabaaaa", "aaba"),
    ],
)
def test_a_failed_attempt_can_be_the_beginning_of_the_next(text, stop, shown):
    matcher = StopStrings([stop]).matcher()
    assert "".join(map(matcher.add, text)) + matcher.flush() == shown


def test_without_stop_strings_nothing_is_held_back():
    assert StopStrings([]).matcher().add("anything") == "anything"


@pytest.mark.parametrize("include", [True, False])
def test_text_after_the_stop_string_is_dropped(include):
    matcher = StopStrings(["END"], include_in_output=include).matcher()
    assert matcher.add("one E") == "one "
    assert matcher.add("ND two") == ("END" if include else "")


def test_the_longest_of_two_that_end_together_is_reported():
    matcher = StopStrings(["b", "ab"]).matcher()
    assert matcher.add("xab") == "x"
    assert matcher.matched == "ab"
