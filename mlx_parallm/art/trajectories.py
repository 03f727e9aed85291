"""From ART's trajectories to rows of training sessions.

Trajectories are read by the names of their fields, because ART need not be installed: those that
agents build (``messages_and_choices``) and those that ART captures (``exchanges``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from mlx_parallm.art.server import BackendError

#: ``Turns``: messages in OpenAI's form.
Turns = list[dict[str, Any]]
# TOKEN_ID: prefix of a token whose id is its text.
TOKEN_ID = "token_id:"
# DEVIATION: added to the deviation of a group's rewards, as ART does.
DEVIATION = 1e-6
ALL_TURNS, LAST_TURN = "all", "last"


@dataclass(frozen=True, slots=True)
class Sampled:
    """An answer that the model has sampled.

    Attributes:
        messages: those that it answers.
        tools: those of its request.
        prompt_ids: its prompt's tokens; None if the trajectory has only the messages.
        token_ids: its tokens.
        logprobs: of its tokens, when they were sampled.
    """

    messages: Turns
    tools: Sequence[Any] | None
    prompt_ids: Sequence[int] | None
    token_ids: Sequence[int]
    logprobs: Sequence[float]


def group_advantages(rewards: Sequence[float], *, is_scaled: bool = True) -> list[float]:
    """Return a group's rewards above their mean, in deviations if they are scaled."""
    if len(set(rewards)) <= 1:
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    scale = pstdev(rewards) + DEVIATION if is_scaled else 1.0
    return [(reward - mean) / scale for reward in rewards]


def sampled_answers(trajectory: Any, name: str) -> list[Sampled]:
    """Return the answers of a trajectory that have log-probabilities.

    Args:
        trajectory: ART's.
        name: the model's; captured answers of other models are left out.
    """
    answers: list[Sampled] = []
    for items, tools in _histories(trajectory):
        messages: Turns = []
        for item in items:
            if not _is_choice(item):
                messages.append(dict(item))
                continue
            answer = _sampled(item, list(messages), tools, None)
            if answer is not None:
                answers.append(answer)
            messages.append(_message(item))
    for exchange in _captured(trajectory, name):
        request, prompt_ids = exchange.request, _extra(exchange.response, "prompt_token_ids")
        before, tools = [dict(turn) for turn in request["messages"]], request.get("tools")
        answers += filter(
            None,
            (_sampled(choice, before, tools, prompt_ids) for choice in exchange.response.choices),
        )
    return answers


def conversations(trajectory: Any, name: str, turns: str = ALL_TURNS) -> list[dict[str, Any]]:
    """Return a trajectory's conversations as rows; ``turns``: which of the assistant's count.

    Turns of the assistant that say nothing never do.
    """
    whole: list[tuple[Turns, Sequence[Any] | None]] = [
        ([_message(item) if _is_choice(item) else dict(item) for item in items], tools)
        for items, tools in _histories(trajectory)
    ]
    for exchange in _captured(trajectory, name):
        before = [dict(turn) for turn in exchange.request["messages"]]
        tools = exchange.request.get("tools")
        whole += [([*before, _message(choice)], tools) for choice in exchange.response.choices]
    return [_row(messages, tools, turns) for messages, tools in whole]


def teaches(row: Mapping[str, Any]) -> bool:
    """True if a turn of a conversation counts."""
    return any(turn["role"] == "assistant" and turn.get("weight") != 0 for turn in row["messages"])


def _row(messages: Turns, tools: Sequence[Any] | None, turns: str) -> dict[str, Any]:
    places = [at for at, turn in enumerate(messages) if turn["role"] == "assistant"]
    others = set(places[:-1] if turns == LAST_TURN else ())
    others |= {at for at in places if _is_silent(messages[at])}
    counted = [turn | {"weight": 0} if at in others else turn for at, turn in enumerate(messages)]
    return {"messages": counted} | ({"tools": list(tools)} if tools else {})


def _is_silent(turn: Mapping[str, Any]) -> bool:
    content = turn.get("content")
    said = content.strip() if isinstance(content, str) else content
    return not said and not turn.get("tool_calls")


def _histories(trajectory: Any) -> Iterator[tuple[Sequence[Any], Sequence[Any] | None]]:
    """Yield the items of each history of a trajectory that has some, and its tools."""
    for history in (trajectory, *getattr(trajectory, "additional_histories", ())):
        if history.messages_and_choices:
            yield history.messages_and_choices, getattr(history, "tools", None)


def _captured(trajectory: Any, name: str) -> list[Any]:
    """Return the chats that ART has captured of a model, whatever its step."""
    exchanges = getattr(trajectory, "exchanges", None)
    chats = getattr(exchanges, "chat_completions", ())
    return [chat for chat in chats if str(chat.model).partition("@")[0] == name]


def _is_choice(item: Any) -> bool:
    """True for an answer of OpenAI's client; other items are messages."""
    return not isinstance(item, Mapping)


def _message(choice: Any) -> dict[str, Any]:
    """Return an answer as a message of a later request."""
    message = {"role": "assistant", "content": choice.message.content or ""}
    calls = getattr(choice.message, "tool_calls", None)
    return message | (
        {"tool_calls": [call.model_dump(mode="json") for call in calls]} if calls else {}
    )


def _sampled(
    choice: Any, messages: Turns, tools: Sequence[Any] | None, prompt_ids: Sequence[int] | None
) -> Sampled | None:
    """Return a choice with its tokens; None if it has no log-probabilities.

    Raises:
        BackendError: tokens and log-probabilities do not fit.
    """
    content = getattr(choice.logprobs, "content", None)
    if not content:
        return None
    ids = _extra(choice, "token_ids") or [_token_id(token) for token in content]
    if len(ids) != len(content):
        raise BackendError(
            f"A choice has {len(ids)} token_ids and {len(content)} log-probabilities."
        )
    prompt_ids = _extra(choice, "prompt_token_ids") or prompt_ids
    return Sampled(messages, tools, prompt_ids, list(ids), [token.logprob for token in content])


def _token_id(token: Any) -> int:
    text = str(token.token)
    if not text.startswith(TOKEN_ID):
        raise BackendError(
            "A choice has no token ids: request it by the client of model.openai_client(), or "
            "with return_token_ids."
        )
    return int(text.removeprefix(TOKEN_ID))


def _extra(answer: Any, name: str) -> Any:
    """Return a field of an answer that OpenAI's types do not have; None without it."""
    return getattr(answer, name, None)
