"""The verdicts of scripts/check_seq2seq.py: equal, a near tie, and wrong."""

from __future__ import annotations

import pytest

from scripts.check_seq2seq import NEW_TOKENS, SOURCES, Answer, sources, verdict

PEER = Answer(source=[5, 1], tokens=[0, 7, 8, 9], gaps=[0.5, 1e-4, 0.5])


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([0, 7, 8, 9], "equal"),
        ([0, 7, 6, 9], "near tie: token 2"),
        ([0, 7, 6], "near tie: token 2"),
        ([0, 6, 8, 9], "wrong: token 1"),
        ([0, 7, 8, 6], "wrong: token 3"),
        ([3, 7, 8, 9], "wrong: token 0"),
        ([0, 7, 8], "wrong: token 3"),
        ([0, 7, 8, 9, 9], "wrong: token 4"),
    ],
)
def test_tokens_may_differ_from_a_near_tie_on(tokens: list[int], expected: str) -> None:
    assert verdict(Answer(source=[5, 1], tokens=tokens), PEER).startswith(expected)


def test_ids_of_the_source_must_be_equal() -> None:
    assert verdict(Answer(source=[5], tokens=PEER.tokens), PEER).startswith("wrong: the source")


def test_the_sources_are_as_many_as_the_page_says() -> None:
    texts = sources()
    assert len(texts) == len(set(texts)) == SOURCES == 20
    assert all(text.strip() for text in texts)
    assert NEW_TOKENS == 64
