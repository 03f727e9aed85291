"""From a conversation to the tokens that a model learns to write, and those that it reads.

A chat template writes a conversation whole, so a message of the assistant is a span of the text.
Where the text begins with what the template writes for the messages before it, the span follows
that. Some templates write earlier messages otherwise than the last one, or have a generation prompt
that is no beginning of what they write later: there the message's own content is the span.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from mlx_parallm.api.chat.schema import ChatMessage, turns_of
from mlx_parallm.api.mezo.rows import says_nothing
from mlx_parallm.api.turns.history import template_messages
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.template_time import at_one_time
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.training import ChoiceInput

ASSISTANT = "assistant"
# MARKS: contents that share no beginning and no end; a template writes both in one place.
MARKS = ("<\u2022\u2460", "\u2461\u2022>")


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a text, by characters, that is learnt with a weight."""

    begin: int
    end: int
    weight: float


@at_one_time()
def conversation_input(
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]] | None,
    model: GenerationModel,
) -> ChoiceInput:
    """Return a conversation as one continuation of its first messages.

    Its result is the mean log-probability of the tokens of all assistant messages, each times its
    message's ``weight`` (1 by default).

    Raises:
        InvalidRequestError: no assistant message is to be learnt, or the template cannot write the
            conversation.
    """
    weights = [_weight(message, number) for number, message in enumerate(messages)]
    if not any(weights):
        raise InvalidRequestError("no assistant message has a weight other than 0")
    turns = template_messages(turns_of(messages), id_length=model.call_id_length)
    turns = [{key: value for key, value in turn.items() if key != "weight"} for turn in turns]
    written = _Written(turns, tools, model)
    spans = [written.span(number, weight) for number, weight in enumerate(weights) if weight]
    tokens, learnt = _tokens(written.text, spans, model)
    return _continuation(tokens, learnt)


def _weight(message: ChatMessage, number: int) -> float:
    """Return how much a message counts; 0 for those that the model reads.

    Raises:
        InvalidRequestError: the weight is none, or the message to be learnt says nothing.
    """
    weight = _own_weight(message, number)
    if weight and says_nothing(message):
        raise InvalidRequestError(
            f"messages[{number}].content is empty, and there are no tool calls: only the end would "
            "be learnt. Its weight may be 0"
        )
    return weight


def _own_weight(message: ChatMessage, number: int) -> float:
    weight = (message.model_extra or {}).get("weight")
    if message.role != ASSISTANT:
        if weight is not None:
            raise InvalidRequestError(f"messages[{number}].weight is only an assistant's")
        return 0.0
    if weight is None:
        return 1.0
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight <= 1e6:
        raise InvalidRequestError(f"messages[{number}].weight must be a number of 0 or more")
    return float(weight)


class _Written:
    """A conversation as the template writes it."""

    def __init__(
        self,
        turns: Sequence[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        model: GenerationModel,
    ) -> None:
        self._turns, self._tools, self._model = turns, tools, model
        self.text = self._render(turns)

    def _render(self, turns: Sequence[dict[str, Any]], *, asks: bool = False) -> str:
        return self._model.tokenizer.render_chat(
            turns, tools=self._tools, add_generation_prompt=asks
        )

    def span(self, number: int, weight: float) -> Span:
        """Return what the assistant wrote as a message, its end token included."""
        before, after = self._turns[:number], self._turns[: number + 1]
        head = self._render(before, asks=True) if before else ""
        whole = self.text if len(after) == len(self._turns) else self._render(after)
        if head and whole.startswith(head) and self.text.startswith(whole):
            span = Span(len(head), self._ended(len(head), len(whole)), weight)
        else:
            span = self._content_span(number, weight)
        self._check_written(span, number)
        return span

    def _check_written(self, span: Span, number: int) -> None:
        """Raise InvalidRequestError if only an end is written of what the assistant says."""
        said = self.text[span.begin : span.end]
        for end in self._end_texts:
            said = said.removesuffix(end)
        if not said.strip():
            raise InvalidRequestError(
                f"the chat template writes nothing of messages[{number}] but its end"
            )

    def _ended(self, begin: int, end: int) -> int:
        """Return where a message ends: behind its end token, if it has one."""
        ends = [(self.text.rfind(each, begin, end), len(each)) for each in self._end_texts]
        return max((at + length for at, length in ends if at >= 0), default=end)

    @cached_property
    def _end_texts(self) -> list[str]:
        tokenizer = self._model.tokenizer
        ends = (tokenizer.decode([end], skip_special_tokens=False) for end in tokenizer.eos_ids)
        return [end for end in ends if end]

    def _content_span(self, number: int, weight: float) -> Span:
        """Return the content of a message, and what the template writes to end it.

        Tool calls follow the content, wherever the template writes that.
        """
        turns = self._turns[: number + 1]
        whole = self._render(turns)
        if self._turns[number].get("tool_calls"):
            begin, _ = self._marked(self._turns, number, self.text)
            if not self.text.startswith(whole) or begin > len(whole):
                raise _unwritten(number)
            return Span(begin, self._ended(begin, len(whole)), weight)
        begin, end = self._content(self._turns, number, self.text)
        _, own_end = self._content(turns, number, whole)
        behind = whole[own_end:].rstrip()
        endings = [each for each in (behind, *self._end_texts) if self.text.startswith(each, end)]
        behind_end = end + max(map(len, endings), default=0)
        return Span(begin, self._ended(end, behind_end), weight)

    def _content(self, turns: Sequence[dict[str, Any]], number: int, text: str) -> tuple[int, int]:
        """Return where a message's content begins and ends in the text of the turns."""
        begin, tail = self._marked(turns, number, text)
        end = len(text) - tail
        if end < begin:
            raise _unwritten(number)
        return begin, end

    def _marked(self, turns: Sequence[dict[str, Any]], number: int, text: str) -> tuple[int, int]:
        """Return how much of the turns' text is before a message's content, and how much behind."""
        first, second = (
            self._render([*turns[:number], turns[number] | {"content": mark}, *turns[number + 1 :]])
            for mark in MARKS
        )
        begin, tail = _common(first, second), _common(first[::-1], second[::-1])
        is_plain = begin + tail == len(first) - len(MARKS[0])
        if not is_plain or text[:begin] != first[:begin]:
            raise _unwritten(number)
        return begin, tail


def _unwritten(number: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"the chat template does not write the content of messages[{number}] as it is"
    )


def _common(first: str, second: str) -> int:
    """Return how many characters two texts begin with alike."""
    pairs = zip(first, second, strict=False)
    same = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
    return min(len(first), len(second)) if same is None else same


def _tokens(
    text: str, spans: Sequence[Span], model: GenerationModel
) -> tuple[list[int], list[float]]:
    """Return the tokens of a text, and the weight of each."""
    tokenizer = model.tokenizer
    tokens = list(tokenizer.encode(text, add_special_tokens=False))
    pieces = [tokenizer.token_bytes(token) for token in tokens]
    if b"".join(pieces) != text.encode():
        return _tokens_by_parts(text, spans, model)
    weights = [0.0] * len(tokens)
    begins = list(accumulate(map(len, pieces), initial=0))[:-1]
    for span in spans:
        first, last = len(text[: span.begin].encode()), len(text[: span.end].encode())
        for place, begin in enumerate(begins):
            if first <= begin < last:
                weights[place] = span.weight
    return tokens, weights


def _tokens_by_parts(
    text: str, spans: Sequence[Span], model: GenerationModel
) -> tuple[list[int], list[float]]:
    """Return the same of a tokenizer whose tokens do not spell the text: spans are read apart."""
    tokens: list[int] = []
    weights: list[float] = []
    ends = [0, *(place for span in spans for place in (span.begin, span.end)), len(text)]
    for number, (begin, end) in enumerate(pairwise(ends)):
        part = model.tokenizer.encode(text[begin:end], add_special_tokens=False)
        tokens += part
        weights += [spans[number // 2].weight if number % 2 else 0.0] * len(part)
    return tokens, weights


def _continuation(tokens: Sequence[int], weights: Sequence[float]) -> ChoiceInput:
    """Return tokens behind those before the first that counts; those after the last are dropped."""
    counted = [place for place, weight in enumerate(weights) if weight]
    if not counted:
        raise InvalidRequestError("the assistant's messages have no token")
    first, end = max(1, counted[0]), counted[-1] + 1
    scale = 1 / len(counted)
    return ChoiceInput(
        tuple(tokens[:first]),
        (tuple(tokens[first:end]),),
        weights=(tuple(weight * scale for weight in weights[first:end]),),
    )
