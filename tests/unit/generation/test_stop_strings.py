import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.generation.stop_texts import StopTexts
from mlx_parallm.grammar.regex.search import (
    MAX_HELD,
    StopExpressions,
    check_stop_expressions,
)
from mlx_parallm.types.errors import InvalidRequestError


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
    matcher = StopTexts(stop, include_in_output=include).matcher()
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
    matcher = StopTexts(stop).matcher()
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
    matcher = StopTexts([stop]).matcher()
    assert "".join(map(matcher.add, text)) + matcher.flush() == shown


def test_without_stop_strings_nothing_is_held_back():
    assert StopTexts([]).matcher().add("anything") == "anything"


@pytest.mark.parametrize("include", [True, False])
def test_text_after_the_stop_string_is_dropped(include):
    matcher = StopTexts(["END"], include_in_output=include).matcher()
    assert matcher.add("one E") == "one "
    assert matcher.add("ND two") == ("END" if include else "")


def test_the_longest_of_two_that_end_together_is_reported():
    matcher = StopTexts(["b", "ab"]).matcher()
    assert matcher.add("xab") == "x"
    assert matcher.matched == "ab"


EXPRESSIONS = [
    "a+b",
    "b{2,3}",
    "(?:ab|ba)a?",
    "[^a]a",
    r"\n\s*b",
    "a.{2}a",
    "(?i:A)B",
    "^b",
    "^ab|ba",
]


def first_match(text: str, expressions: list[str]) -> tuple[int, int] | None:
    """Return where the first complete match begins and ends; the longest that ends there."""
    for end in range(1, len(text) + 1):
        for start in range(end):
            for expression in expressions:
                if re.compile(expression).fullmatch(text, start, end):
                    return start, end
    return None


@given(
    texts,
    st.lists(st.sampled_from(EXPRESSIONS), min_size=1, max_size=3),
    st.lists(st.integers(0, 99)),
)
def test_expressions_equal_the_reference_however_the_text_is_cut(text, expressions, cuts):
    matcher = StopTexts([], expressions).matcher()
    out = ""
    for piece in pieces(text, cuts):
        out += matcher.add(piece)
        if matcher.matched is not None:
            break
    place = first_match(text, expressions)
    if place is None:
        assert matcher.matched is None
        assert out + matcher.flush() == text
    else:
        assert matcher.matched in expressions
        assert out == text[: place[0]]


def test_only_what_may_match_is_held_back():
    matcher = StopTexts(["END"], [r"\d{3}-\d+"]).matcher()
    assert [matcher.add(each) for each in ("a1", "2", "3x", "12", "3-")] == [
        "a",
        "",
        "123x",
        "",
        "",
    ]
    assert matcher.add("4567") == ""
    assert matcher.matched == r"\d{3}-\d+"


def test_a_string_and_an_expression_that_end_together():
    matcher = StopTexts(["b"], ["a?b"]).matcher()
    assert matcher.add("xab") == "x"
    assert matcher.matched == "a?b"


def test_what_is_held_back_is_bounded():
    matcher = StopTexts([], ["a[^b]*b"]).matcher()
    assert len(matcher.add("a" * 5000)) == 5000 - MAX_HELD
    # The first characters of a longer match were emitted already.
    assert matcher.add("b") == "a"
    assert matcher.matched == "a[^b]*b"


@pytest.mark.parametrize(
    ("expression", "what"),
    [
        ("a*", "empty"),
        ("^", "empty"),
        ("a$", "end"),
        ("(?=a)b", "begins with"),
        (r"(a)\1", "not supported"),
        (r"\ba", "not supported"),
        ("a{300}", "states"),
        ("(a{50}){50}", "states"),
        ("a" * 5000, "characters"),
        ("(", "parenthesis"),
        ("[a", "bracket"),
        ("*a", "nothing"),
        ("a**", "repeated repetition"),
        ("a" + "{1}" * 1300, "repeated repetition"),
        ("(" * 1500 + "a" + ")" * 1500, "deeper"),
        ("(?:a|" * 60 + "b" + ")" * 60, "deeper"),
        ("(?:(?:(?:){99999}){99999}){99999}b", "states"),
        ("(?:){0,99999}c", "states"),
        ("(?:a{9}){99999}", "states"),
        ("(?:" * 49 + "){9}" * 49 + "d", "states"),
    ],
)
def test_what_cannot_end_a_text_is_refused(expression, what):
    with pytest.raises(InvalidRequestError, match=what):
        check_stop_expressions([expression])


def test_a_hostile_expression_takes_no_longer_than_its_states_allow():
    matcher = StopTexts([], ["(x+x+)+y", "(a|b)*a(a|b){40}c"]).matcher()
    assert len(matcher.add("x" * 2000 + "ab" * 1000)) == 4000 - MAX_HELD


@pytest.mark.parametrize(
    "expression", ["(?s){99999}d", "(?:){99999}d", "(?:(?:)()){99999}d", "(?:(){0,9}){9}d"]
)
def test_a_repetition_of_nothing_ends_at_once(expression):
    matcher = StopTexts([], [expression]).matcher()
    assert matcher.add("abcd") == "abc"
    assert matcher.matched == expression


def test_only_the_earliest_live_match_is_held_back():
    search = StopExpressions([".END", "[a-z]{2}x"]).search()
    held = [search.num_held for each in "abcEN\nabEN" * 300 if search.add(each) is None]
    assert len(held) == 3000
    assert max(held) == 3


def test_a_match_has_the_length_of_its_earliest_beginning():
    search = StopExpressions(["(?:ab)+c", "b+c"]).search()
    assert [search.add(each) for each in "xababc"][-1] == ("(?:ab)+c", 5)


def test_the_expressions_of_a_request_are_prepared_once():
    patterns = ("once[a-f]",)
    check_stop_expressions(patterns)
    assert StopTexts([], patterns).expressions is StopTexts([], patterns).expressions
