"""Rollouts: seeds, verdicts, and messages behind tokens that stay as they are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.api.http.forms import INT64
from mlx_parallm.api.rl.answer import seed_of
from mlx_parallm.api.rl.groups import Verdict
from mlx_parallm.api.rl.judges import check_url, read_verdict
from mlx_parallm.api.rl.schema import RolloutRequest
from mlx_parallm.api.turns.appended import appended_ids
from mlx_parallm.tokenizer.rewrites import one_call_at_a_time
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.token_limit import TokenLimit
from tests.fakes import EOS, ByteTokenizer


def rollout_request(**fields: Any) -> RolloutRequest:
    """Return a request as it is read from a body."""
    return RolloutRequest.model_validate(fields)


class TurnTokenizer(ByteTokenizer):
    """Bytes, and ``$`` for the token that ends a turn."""

    def encode(
        self, text: str, *, add_special_tokens: bool = True, limit: TokenLimit | None = None
    ) -> list[int]:
        return [EOS if byte == ord("$") else byte for byte in text.encode()]

    def token_string(self, token_id: int) -> str:
        return "$" if token_id == EOS else chr(token_id)


def render(messages: Sequence[Mapping[str, Any]], open_turn: bool) -> str:
    """Render a system text first; the template cannot begin with a turn of the assistant."""
    turns = "".join(f"<{message['role']}>{message['content']}$\n" for message in messages)
    return f"SYSTEM$\n{turns}" + ("<assistant>" if open_turn else "")


def strict_about_tools(messages: Sequence[Mapping[str, Any]], open_turn: bool) -> str:
    """Render messages; the template accepts a tool's result only after a call with its id."""
    text, known = "", set()
    for message in messages:
        calls = message.get("tool_calls", [])
        known |= {call["id"] for call in calls}
        if message["role"] == "tool" and message["tool_call_id"] not in known:
            raise InvalidRequestError("no such call", param="messages")
        text += f"<{message['role']}>{message['content']}" + "(call)" * len(calls) + "$\n"
    return text + ("<assistant>" if open_turn else "")


USER = [{"role": "user", "content": "more"}]


@pytest.mark.parametrize("ends_with_eos", [True, False])
def test_only_new_messages_are_rendered(ends_with_eos: bool) -> None:
    tokenizer = TurnTokenizer()
    ids = [1, 2, EOS] if ends_with_eos else [1, 2, 3]
    added = appended_ids(tokenizer, ids, USER, render)
    end = "" if ends_with_eos else "$"
    assert list(added) == tokenizer.encode(f"{end}\n<user>more$\n<assistant>")


def test_the_turn_can_be_left_closed() -> None:
    added = appended_ids(TurnTokenizer(), [1, EOS], USER, render, open_turn=False)
    assert list(added) == TurnTokenizer().encode("\n<user>more$\n")


def test_a_message_may_hold_the_word_that_stands_in() -> None:
    messages = [{"role": "user", "content": "standin0 standin1"}]
    added = appended_ids(TurnTokenizer(), [1, EOS], messages, render)
    assert list(added) == TurnTokenizer().encode("\n<user>standin0 standin1$\n<assistant>")


def test_a_template_that_wants_calls_gets_them() -> None:
    results = [
        {"role": "tool", "content": "4", "tool_call_id": "a"},
        {"role": "tool", "content": "5", "tool_call_id": "b"},
    ]
    added = appended_ids(TurnTokenizer(), [9, EOS], results, strict_about_tools)
    assert list(added) == TurnTokenizer().encode("\n<tool>4$\n<tool>5$\n<assistant>")


def test_results_follow_each_other_where_a_template_takes_one_call_a_turn() -> None:
    def one_call(messages: Sequence[Mapping[str, Any]], open_turn: bool) -> str:
        fitted = one_call_at_a_time(messages)
        if fitted[1]["role"] == "assistant" and "tool_calls" not in fitted[1]:
            raise InvalidRequestError("no previous call", param="messages")
        return render(fitted, open_turn)

    results = [
        {"role": "tool", "tool_call_id": id_, "content": f"result {id_}"} for id_ in ("a", "b")
    ]
    added = appended_ids(TurnTokenizer(), [9, EOS], results, one_call)
    expected = "\n<tool>result a$\n<tool>result b$\n<assistant>"
    assert list(added) == TurnTokenizer().encode(expected)


def test_a_template_that_drops_earlier_turns_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="one after another"):
        appended_ids(
            TurnTokenizer(), [1], USER, lambda messages, _open: str(messages[-1]["content"])
        )


@given(st.integers(-INT64, INT64 - 1), st.integers(1, 5), st.integers(1, 128), st.integers(0, 127))
def test_no_two_samples_of_a_rollout_share_a_seed(
    seed: int, num_prompts: int, n: int, index: int
) -> None:
    body = rollout_request(prompts=["x"] * num_prompts, n=n, seed=seed)
    firsts = [seed_of(number, item, body) for number, item in enumerate(body.items())]
    assert all(first is not None and -INT64 <= first < INT64 for first in firsts)
    samples = {(first + i) % (2 * INT64) for first in firsts if first is not None for i in range(n)}
    assert len(samples) == num_prompts * n


def test_a_prompts_own_seed_wins() -> None:
    prompts: Any = ["a", {"text": "b", "seed": 7}]
    body = rollout_request(prompts=prompts, n=2, seeds=[1, 2], seed=3)
    assert [seed_of(number, item, body) for number, item in enumerate(body.items())] == [1, 7]


@pytest.mark.parametrize(
    "item",
    [
        {},
        {"text": "a", "token_ids": [1]},
        {"text": "a", "append_text": "b"},
        {"token_ids": [1], "append_text": "b", "append_messages": USER},
    ],
)
def test_fields_of_a_prompt_that_exclude_each_other(item: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"prompts\[1\]"):
        rollout_request(prompts=["a", item]).items()


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ({"reward": 0.5}, 0.5),
        ({"reward": 3, "why": "good"}, 3.0),
        ({"reward": True}, 1.0),
        ({"reward": -1e10}, -1e10),
    ],
)
def test_a_reward_is_read(answer: Any, reward: float) -> None:
    assert read_verdict(json.dumps(answer).encode()) == Verdict(reward=reward)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff",
        b"[1]",
        b"{}",
        b'{"reward": "1"}',
        b'{"reward": null}',
        b'{"reward": NaN}',
        b'{"reward": Infinity}',
        b'{"reward": 1' + b"0" * 400 + b"}",
        b"[" * 100_000,
    ],
)
def test_what_is_no_reward_is_an_error(answer: bytes) -> None:
    verdict = read_verdict(answer)
    assert verdict.reward is None
    assert verdict.error


@given(st.binary())
def test_no_answer_of_a_verifier_breaks_the_rollout(answer: bytes) -> None:
    verdict = read_verdict(answer)
    assert (verdict.reward is None) != (verdict.error is None)


@pytest.mark.parametrize("url", ["http://a/", "http://a/score/", "http://A/score", "file:///a"])
def test_only_the_operators_urls_are_asked(url: str) -> None:
    check_url("http://a/score", ("http://b", "http://a/score"))
    with pytest.raises(InvalidRequestError):
        check_url(url, ("http://b", "http://a/score"))
