"""Log-probabilities in the shapes of OpenAI and vLLM."""

from __future__ import annotations

from mlx_parallm.api.turns.logprobs import (
    CompletionLogprobs,
    TokenNames,
    chat_logprobs,
    prompt_logprobs,
)
from mlx_parallm.types.step import TokenLogprob
from tests.fakes import ByteTokenizer

NAMES = TokenNames(ByteTokenizer(), as_ids=False)


def test_a_prompt_token_has_its_rank_wherever_it_is() -> None:
    top = ((97, -0.1), (98, -2.5))
    entries = [None, TokenLogprob(99, -9.0, top, 41), TokenLogprob(98, -2.5, top, 2)]
    first, second, third = prompt_logprobs(entries, NAMES)
    assert first is None
    assert second == {
        "99": {"logprob": -9.0, "rank": 41, "decoded_token": "c"},
        "97": {"logprob": -0.1, "rank": 1, "decoded_token": "a"},
        "98": {"logprob": -2.5, "rank": 2, "decoded_token": "b"},
    }
    assert third is not None
    assert [(key, entry["rank"]) for key, entry in third.items()] == [("98", 2), ("97", 1)]


def test_equally_likely_tokens_are_ranked_in_order() -> None:
    (entry,) = prompt_logprobs([TokenLogprob(98, -0.7, ((97, -0.7), (98, -0.7)), 1)], NAMES)
    assert entry is not None
    assert {key: details["rank"] for key, details in entry.items()} == {"97": 1, "98": 2}


def test_the_sampled_token_of_a_completion_is_first_then_the_others_by_rank() -> None:
    top = ((97, -0.1), (98, -2.5), (100, -3.0))
    outside, inside = TokenLogprob(99, -9.0, top, 41), TokenLogprob(98, -2.5, top, 2)
    shown = CompletionLogprobs(NAMES).take([(99, outside), (98, inside)])["top_logprobs"]
    assert [list(entry.items()) for entry in shown] == [
        [("c", -9.0), ("a", -0.1), ("b", -2.5), ("d", -3.0)],
        [("b", -2.5), ("a", -0.1), ("d", -3.0)],
    ]


def test_an_alternative_of_the_same_text_does_not_replace_the_sampled_tokens_value() -> None:
    # Bytes that are no text alone have the same name.
    entry = TokenLogprob(200, -2.0, ((201, -0.5), (200, -2.0)), 2)
    (top,) = CompletionLogprobs(NAMES).take([(200, entry)])["top_logprobs"]
    assert top == {"\ufffd": -2.0}


class MarkedTokenizer(ByteTokenizer):
    """Bytes, of which ``$`` ends turns."""

    special_tokens = frozenset({"$"})


def test_special_tokens_that_a_text_lacks_take_no_characters() -> None:
    names = TokenNames(MarkedTokenizer(), as_ids=False)
    tokens = [(ord(each), None) for each in "$a$b$"]
    for text, wanted in [
        ("ab", [0, 0, 1, 1, 2]),
        ("$ab", [0, 1, 2, 2, 3]),
        ("a$b", [0, 0, 1, 2, 3]),
        (None, [0, 1, 2, 3, 4]),
    ]:
        logprobs = CompletionLogprobs(names)
        assert logprobs.take(tokens, text=text)["text_offset"] == wanted
        assert logprobs.take([(97, None)])["text_offset"] == [
            len("$a$b$" if text is None else text)
        ]


def test_special_tokens_are_told_as_such() -> None:
    names = TokenNames(MarkedTokenizer(), as_ids=True)
    entry = TokenLogprob(token_id=ord("$"), logprob=-0.5, rank=1, top=((ord("a"), -1.0),))
    (shown,) = chat_logprobs([entry], names)["content"]
    assert shown["special"] is True
    assert shown["bytes"] == [ord("$")]
    assert "special" not in shown["top_logprobs"][0]
