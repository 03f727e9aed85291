"""Rows of ART's trajectories, whose types have stand-ins with the same fields."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.art.server import BackendError
from mlx_parallm.art.trajectories import conversations, group_advantages, sampled_answers, teaches

NAME = "policy"
ASK: dict[str, Any] = {"role": "user", "content": "ask"}


def choice(content: str | None, ids: list[int], **fields: Any) -> SimpleNamespace:
    tokens = [SimpleNamespace(token=f"token_id:{each}", logprob=-each / 10) for each in ids]
    calls = fields.pop("tool_calls", None)
    return SimpleNamespace(
        message=SimpleNamespace(content=content, tool_calls=calls),
        logprobs=SimpleNamespace(content=tokens) if ids else None,
        **fields,
    )


def trajectory(*items: Any, **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(messages_and_choices=list(items), tools=None, reward=1.0, **fields)


def test_every_choice_answers_what_was_before_it() -> None:
    first, second = choice("one", [1, 2]), choice("two", [3])
    answers = sampled_answers(trajectory(ASK, first, ASK, second), NAME)
    assert [answer.messages for answer in answers] == [
        [ASK],
        [ASK, {"role": "assistant", "content": "one"}, ASK],
    ]
    assert [answer.token_ids for answer in answers] == [[1, 2], [3]]
    assert answers[0].logprobs == [-0.1, -0.2]
    assert answers[0].prompt_ids is None


def test_the_tokens_of_an_answer_win_over_those_of_its_logprobs() -> None:
    exact = choice("one", [1, 2], token_ids=[7, 8], prompt_token_ids=[5])
    (answer,) = sampled_answers(trajectory(ASK, exact), NAME)
    assert (answer.prompt_ids, answer.token_ids) == ([5], [7, 8])
    with pytest.raises(BackendError, match="3 token_ids and 2 log-probabilities"):
        sampled_answers(trajectory(ASK, choice("one", [1, 2], token_ids=[7, 8, 9])), NAME)


def test_messages_and_choices_without_logprobs_are_not_sampled() -> None:
    said = {"role": "assistant", "content": "by hand"}
    assert sampled_answers(trajectory(ASK, said, ASK, choice("one", [])), NAME) == []


def test_tokens_that_are_texts_are_refused_by_what_to_do() -> None:
    plain = choice("one", [1])
    plain.logprobs.content[0].token = "one"
    with pytest.raises(BackendError, match="return_token_ids"):
        sampled_answers(trajectory(ASK, plain), NAME)


def test_further_histories_and_captured_chats_are_read() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    history = SimpleNamespace(messages_and_choices=[ASK, choice("two", [2])], tools=tools)
    own = trajectory(ASK, choice("one", [1]), additional_histories=[history])
    assert [answer.tools for answer in sampled_answers(own, NAME)] == [None, tools]
    captured = [
        SimpleNamespace(
            model=model,
            request={"messages": [ASK], "tools": tools},
            response=SimpleNamespace(choices=[choice("one", [1])], prompt_token_ids=[4]),
        )
        for model in (NAME, f"{NAME}@3", "judge")
    ]
    chats = SimpleNamespace(chat_completions=captured)
    answers = sampled_answers(trajectory(exchanges=chats), NAME)
    assert [answer.prompt_ids for answer in answers] == [[4], [4]]
    rows = conversations(trajectory(exchanges=chats), NAME)
    assert (
        rows == [{"messages": [ASK, {"role": "assistant", "content": "one"}], "tools": tools}] * 2
    )


def test_conversations_learn_all_turns_or_the_last() -> None:
    call = SimpleNamespace(model_dump=lambda mode: {"id": "a", "function": {"name": "look"}})
    calling = choice(None, [1], tool_calls=[call])
    own = trajectory(ASK, calling, {"role": "tool", "content": "seen"}, choice("one", [2]))
    (row,) = conversations(own, NAME)
    assert "tools" not in row
    assert [turn.get("weight") for turn in row["messages"]] == [None] * 4
    assert row["messages"][1]["tool_calls"] == [{"id": "a", "function": {"name": "look"}}]
    (row,) = conversations(own, NAME, "last")
    assert [turn.get("weight") for turn in row["messages"]] == [None, 0, None, None]


@pytest.mark.parametrize("silent", ["", None, "  "])
def test_turns_that_say_nothing_teach_nothing(silent: str | None) -> None:
    (row,) = conversations(trajectory(ASK, choice(silent, []), ASK, choice("one", [1])), NAME)
    assert [turn.get("weight") for turn in row["messages"]] == [None, 0, None, None]
    assert teaches(row)
    for turns in ("all", "last"):
        own = trajectory(ASK, {"role": "assistant", "content": silent})
        assert not any(map(teaches, conversations(own, NAME, turns)))


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8))
def test_advantages_are_centred(rewards: list[float]) -> None:
    for is_scaled in (True, False):
        advantages = group_advantages(rewards, is_scaled=is_scaled)
        assert sum(advantages) == pytest.approx(0, abs=1e-6)
        by_reward = sorted(zip(rewards, advantages, strict=True))
        assert [advantage for _, advantage in by_reward] == sorted(advantages)
    if len(set(rewards)) == 1:
        assert group_advantages(rewards) == [0.0] * len(rewards)
