"""Where the latest turn of the user and the answer begin in a prompt, as the template renders it.

The prompt of the next turn agrees up to there, whatever the template makes of what follows: many
drop the reasoning of earlier turns, some move the system prompt or the tools to the last turn. The
template therefore renders the conversation again, with other words in place of that turn, or with
an answer, and with a further turn behind it; where the texts part, the turn or the answer begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mlx_parallm.types.errors import InvalidRequestError

Messages = Sequence[Mapping[str, Any]]
# STAND_IN: a character of Unicode's private use area, with which no text of a user begins.
STAND_IN = "\ue000"
# WINDOW_CHARS: a template writes less between a special token and the words of a user.
WINDOW_CHARS = 256
# NOT_ANSWERS: roles of messages that an answer may follow.
NOT_ANSWERS = ("user", "tool")


class SpecialTokens(Protocol):
    """Methods of a tokenizer that find a place of a text among its tokens."""

    @property
    def special_tokens(self) -> frozenset[str]:
        """Texts that are always tokens of their own."""
        ...

    def token_id(self, token: str) -> int | None:
        """Return the id of a token; None if it is not one token."""
        ...


def turn_place(rendered: str, messages: Messages, render: Callable[[Messages], str]) -> int | None:
    """Return how many characters of a prompt are before the latest turn of the user.

    None if no message is a user's, or the template refuses the other conversation.

    Args:
        rendered: the prompt.
        messages: what it was rendered from.
        render: applies the template in the same way.
    """
    roles = [message.get("role") for message in messages]
    if "user" not in roles:
        return None
    place = len(roles) - 1 - roles[::-1].index("user")
    other = [
        *messages[:place],
        {**messages[place], "content": STAND_IN},
        {"role": "assistant", "content": STAND_IN},
        # Mistral's templates compare messages to find the last one of the user.
        {"role": "user", "content": 2 * STAND_IN},
    ]
    return _common_with(rendered, other, render)


def answer_place(
    rendered: str, messages: Messages, render: Callable[[Messages], str]
) -> int | None:
    """Return how many characters of a prompt the next one begins with, once it is answered.

    What opens an answer often differs from how templates write earlier answers: it may begin a
    reasoning that is dropped later. None if the prompt ends with an answer to be continued, or the
    template refuses the conversation. The arguments are those of ``turn_place``.
    """
    last = messages[-1].get("role") if messages else None
    if last not in NOT_ANSWERS:
        return None
    other = [*messages, {"role": "assistant", "content": STAND_IN}]
    if last == "user":
        # Behind results of tools further ones are likelier, and templates keep reasoning for them.
        other.append({"role": "user", "content": 2 * STAND_IN})
    return _common_with(rendered, other, render)


def _common_with(
    rendered: str, messages: Messages, render: Callable[[Messages], str]
) -> int | None:
    """Return how many characters the text of other messages has in common with a prompt."""
    try:
        return common_length(rendered, render(messages))
    except InvalidRequestError:
        return None


def tokens_before(
    text: str,
    place: int,
    token_ids: Sequence[int],
    tokens: SpecialTokens,
    encode: Callable[[str], Sequence[int]],
) -> int:
    """Return how many tokens of a text surely end before a place of it.

    Args:
        text: the text.
        place: a number of its characters.
        token_ids: its tokens.
        tokens: those by which the place is found without encoding anything.
        encode: tokenises a text; called only if no special token is near the place.
    """
    window = text[max(0, place - WINDOW_CHARS) : place]
    mark = max(tokens.special_tokens, key=lambda token: _end_of_last(token, window), default="")
    mark_id = tokens.token_id(mark) if mark and mark in window else None
    if mark_id is None or text.count(mark) != token_ids.count(mark_id):
        return common_length(tuple(token_ids), tuple(encode(text[:place])))
    end = 0
    for _ in range(text.count(mark, 0, place)):
        end = token_ids.index(mark_id, end) + 1
    return end


def _end_of_last(token: str, text: str) -> int:
    """Return where the last occurrence of a token ends; 0 if there is none."""
    begin = text.rfind(token)
    return 0 if begin < 0 else begin + len(token)


def common_length(values: Sequence[Any], others: Sequence[Any]) -> int:
    """Return how many characters, or tokens, both begin with; by halves, so that C compares."""
    low, high = 0, min(len(values), len(others))
    while low < high:
        middle = (low + high + 1) // 2
        if values[low:middle] == others[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
