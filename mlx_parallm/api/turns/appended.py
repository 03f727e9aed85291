"""The tokens of messages that follow a conversation of which only the tokens are known.

To render the whole conversation anew and tokenise it gives other tokens than those that were
sampled: a text has many spellings in tokens, and templates drop or move parts of earlier turns. So
only what is new is rendered, behind a turn of the assistant that stands in for the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from typing_extensions import override

from mlx_parallm.api.turns.continuation import EncodesText, continuation_ids
from mlx_parallm.generation.model import Tokenizer
from mlx_parallm.images.prompt import TypedMarks
from mlx_parallm.types.errors import InvalidRequestError

Messages = Sequence[Mapping[str, Any]]
# Renders messages; the flag says whether the assistant's turn is opened at the end.
Render = Callable[[Messages, bool], str]


class TurnTokenizer(EncodesText, Protocol):
    """The part of a tokenizer that this module uses."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end generation."""
        ...

    def token_string(self, token_id: int) -> str:
        """Return a token's text."""
        ...


class MarkedTokenizer(TurnTokenizer, EncodesText):
    """A tokenizer that keeps the marks of images apart from those that users typed.

    Implements ``TurnTokenizer``.
    """

    def __init__(self, tokenizer: Tokenizer, marks: TypedMarks) -> None:
        self._tokenizer = tokenizer
        self._marks = marks

    @property
    @override
    def eos_ids(self) -> frozenset[int]:
        return self._tokenizer.eos_ids

    @override
    def token_string(self, token_id: int) -> str:
        return self._tokenizer.token_string(token_id)

    @override
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The texts of turns get no special tokens."""
        assert not add_special_tokens, "turns are within a conversation"
        return self._marks.encode(
            text, lambda piece: self._tokenizer.encode(piece, add_special_tokens=False)
        )


def appended_ids(
    tokenizer: TurnTokenizer,
    token_ids: Sequence[int],
    messages: Messages,
    render: Render,
    *,
    open_turn: bool = True,
) -> tuple[int, ...]:
    """Return the tokens to put behind ``token_ids``, which are left as they are.

    Args:
        tokenizer: the model's.
        token_ids: a conversation that ends with a turn of the assistant, with or without the token
            that ends it.
        messages: what was said after it, as chat templates take them.
        render: the model's chat template.
        open_turn: whether the assistant's next turn is opened.

    Raises:
        InvalidRequestError: the template refuses the messages, or does not write turns one after
            another.
    """
    marker = _marker(messages)
    text = _text_after_turn(tokenizer, marker, messages, render, open_turn)
    ids = continuation_ids(tokenizer, marker, text)
    ends = tokenizer.eos_ids
    if ids and token_ids[-1] in ends and (ids[0] == token_ids[-1] or ids[0] in ends):
        # The turn has ended already.
        return ids[1:]
    return ids


def _text_after_turn(
    tokenizer: TurnTokenizer, marker: str, messages: Messages, render: Render, open_turn: bool
) -> str:
    """Return what the template writes after the assistant's words."""
    before = [{"role": "user", "content": "."}, {"role": "assistant", "content": marker}]
    try:
        text = render([*before, *messages], open_turn)
    except InvalidRequestError:
        if messages[0].get("role") != "tool":
            raise
        # Some templates take a tool's result only after a call.
        return _text_after_calls(tokenizer, before, messages, render, open_turn)
    if text.count(marker) != 1:
        raise _not_in_turns()
    return text.partition(marker)[2]


def _text_after_calls(
    tokenizer: TurnTokenizer,
    before: list[dict[str, Any]],
    messages: Messages,
    render: Render,
    open_turn: bool,
) -> str:
    """Return that text where the assistant's turn ends with calls: from the token that ends it."""
    ends = [tokenizer.token_string(token_id) for token_id in sorted(tokenizer.eos_ids)]
    calls = _calls(messages)
    # A template that takes one call a turn would get each result behind a call of its own.
    for written in (calls, calls[:1]):
        turn = before[-1] | {"tool_calls": written}
        called = render([before[0], turn], False)
        answered = render([before[0], turn, *messages], open_turn)
        place = max(called.rfind(end) for end in ends if end)
        if place >= 0 and answered.startswith(called):
            return answered[place:]
    raise _not_in_turns()


def _calls(messages: Messages) -> list[dict[str, Any]]:
    """Calls of which the first messages are the results."""
    calls: list[dict[str, Any]] = []
    for message in messages:
        if message.get("role") != "tool":
            break
        function: dict[str, Any] = {"name": message.get("name") or "tool", "arguments": {}}
        calls.append({"id": message["tool_call_id"], "type": "function", "function": function})
    return calls


def _marker(messages: Messages) -> str:
    """Return a word that no message has."""
    texts = str(messages)
    number = 0
    while f"standin{number}" in texts:
        number += 1
    return f"standin{number}"


def _not_in_turns() -> InvalidRequestError:
    return InvalidRequestError(
        "This model's chat template does not write turns one after another, so that nothing can be "
        "appended to tokens: send the whole conversation, or append_text.",
        param="messages",
    )
