"""Rows of data of training sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    StrictInt,
    StrictStr,
    Tag,
    model_validator,
)

from mlx_parallm.api.chat.schema import ChatMessage
from mlx_parallm.api.mezo.fields import Loss, Name, Strict, kind_of
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_object

MAX_ROWS = 1_000_000


class AtPlace(Strict):
    """A row of a body, or of a line of a file."""

    _line: int | None = PrivateAttr(None)

    def on_line(self, number: int) -> Self:
        """Return this row, which is on a line of a file, by its number from 1."""
        self._line = number
        return self

    def place(self, number: int, param: str) -> str:
        """Return what errors call the row: its line, or the field that has it and its number."""
        return f"{param} {number}" if self._line is None else f"Line {self._line} of the file"


class Row(AtPlace):
    """An example: a text, its token ids or messages, and its label or completion."""

    text: Annotated[StrictStr, Field(min_length=1)] | None = Field(None, description="The text.")
    token_ids: list[StrictInt] | None = Field(
        None, min_length=1, description="All tokens, special ones and the mask included."
    )
    messages: list[ChatMessage] | None = Field(
        None, min_length=1, description="A conversation, for models with a chat template."
    )
    tools: list[dict[str, Any]] | None = Field(
        None, description="Tools of the messages, which the chat template writes."
    )
    label: StrictStr | StrictInt | None = Field(None, description="The label's name, or its index.")
    completion: StrictStr | list[StrictInt] | None = Field(
        None,
        description="How the text goes on, for the objective completion; token ids stay as they "
        "are, without an end token. Messages need none: those of the assistant are learnt.",
    )
    weights: list[Loss] | None = Field(
        None,
        description="A number of any sign for each token of the completion, its end token "
        "included, by which the token's loss is multiplied; by default 1 / their number.",
    )
    metadata: dict[str, Any] | None = Field(
        None, description="Passed to the verifier with the prompt, for the objective reward."
    )

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if [self.text, self.token_ids, self.messages].count(None) != 2:
            raise ValueError("a row has one of text, token_ids and messages")
        if self.tools is not None and self.messages is None:
            raise ValueError("tools are those of messages")
        return self

    def label_index(self, names: Sequence[str], place: str, param: str) -> int:
        """Return the index of the row's label.

        Args:
            names: the labels.
            place: names the row, for errors.
            param: the field of the body that has the row, likewise.

        Raises:
            InvalidRequestError: it has none of them.
        """
        if isinstance(self.label, int) and 0 <= self.label < len(names):
            return self.label
        if self.label in names:
            return list[str | int | None](names).index(self.label)
        known = ", ".join(names[:20])
        raise InvalidRequestError(
            f"{place} has the label {str(self.label)[:100]!r}; the labels are {known}.", param=param
        )


# OTHER_CONTENTS: what an assistant may say in place of a text.
OTHER_CONTENTS = ("tool_calls", "function_call", "reasoning_content", "reasoning")
Said = StrictStr | Annotated[list[ChatMessage], Field(min_length=1)]


class Conversation(Strict):
    """The prompt of a pair, as OpenAI's files have it."""

    model_config = ConfigDict(extra="ignore")

    messages: list[ChatMessage] = Field(min_length=1, description="The conversation so far.")
    tools: list[dict[str, Any]] | None = Field(None, description="Tools of the conversation.")


class PairRow(AtPlace):
    """Two ways to answer, of which the first is preferred; as TRL and OpenAI write them."""

    prompt: Said | None = Field(
        None,
        description="Text or messages before both; by default both begin with it. It counts once "
        "if whole conversations repeat it.",
    )
    chosen: Said | None = Field(None, description="Text or messages that are preferred.")
    rejected: Said | None = Field(None, description="Text or messages that are not.")
    tools: list[dict[str, Any]] | None = Field(None, description="Tools, for the chat template.")
    margin: Loss = Field(0.0, description="By how much the first score should be ahead.")
    input: Conversation | None = Field(None, description="OpenAI's name of the prompt.")
    preferred_output: list[ChatMessage] | None = Field(
        None, min_length=1, description="OpenAI's name of chosen."
    )
    non_preferred_output: list[ChatMessage] | None = Field(
        None, min_length=1, description="OpenAI's name of rejected."
    )

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        if self.preferred_output is not None or self.non_preferred_output is not None:
            if (self.prompt, self.chosen, self.rejected) != (None, None, None):
                raise ValueError("a pair has chosen and rejected, or the outputs of OpenAI's files")
            if self.input is not None:
                self.prompt, self.tools = self.input.messages, self.input.tools
            self.chosen, self.rejected = self.preferred_output, self.non_preferred_output
        elif self.input is not None:
            raise ValueError("input comes with preferred_output and non_preferred_output")
        if self.chosen is None or self.rejected is None:
            raise ValueError("a pair has both what is preferred and what is not")
        for name, answer in (("chosen", self.chosen), ("rejected", self.rejected)):
            _check_answer(name, answer)
        return self


def says_nothing(message: ChatMessage) -> bool:
    """True if a template writes nothing of a message but its beginning and end."""
    parts = message.content if isinstance(message.content, list) else []
    texts = [message.content, *(part.get(kind) for part in parts for kind in ("text", "refusal"))]
    extra = message.model_extra or {}
    is_silent = not any(isinstance(text, str) and text.strip() for text in texts)
    return is_silent and not any(map(extra.get, OTHER_CONTENTS))


def _check_answer(name: str, answer: Said) -> None:
    """Raise ValueError if the assistant says nothing at the end of an answer."""
    if isinstance(answer, str):
        is_empty = not answer
    elif answer[-1].role != "assistant":
        raise ValueError(f"{name} needs an assistant's turn at its end")
    else:
        is_empty = says_nothing(answer[-1])
    if is_empty:
        raise ValueError(f"{name} cannot be empty")


class PolicyRow(AtPlace):
    """A sample of a policy, and what it is worth."""

    token_ids: list[StrictInt] = Field(min_length=1, description="Tokens of the prompt.")
    completion_ids: list[StrictInt] = Field(min_length=1, description="The sample's tokens.")
    logprobs: list[Loss] = Field(description="Of the sample's tokens, when they were drawn.")
    advantage: Loss = Field(description="What the sample is worth, against others.")
    ref_logprobs: list[Loss] | None = Field(
        None, description="Of the tokens under the reference; by default the session's beginning."
    )
    weights: list[Loss] | None = Field(
        None, description="By which the tokens' losses are multiplied; default 1 / their number."
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        count = len(self.completion_ids)
        for name in ("logprobs", "ref_logprobs", "weights"):
            values = getattr(self, name)
            if values is not None and len(values) != count:
                raise ValueError(f"{name} has {len(values)} values for {count} completion_ids")
        return self


def _row_kind(value: Any) -> str:
    """Return which kind of row a value is to be, so that problems are those of one."""
    if not is_object(value):
        if isinstance(value, PairRow):
            return "<pair>"
        return "<policy>" if isinstance(value, PolicyRow) else "<text>"
    if value.keys() & {"chosen", "rejected", "preferred_output", "non_preferred_output"}:
        return "<pair>"
    return "<policy>" if value.keys() & {"completion_ids", "logprobs", "advantage"} else "<text>"


#: ``AnyRow`` is a row of any objective.
AnyRow = Annotated[
    Annotated[Row, Tag("<text>")]
    | Annotated[PairRow, Tag("<pair>")]
    | Annotated[PolicyRow, Tag("<policy>")],
    Discriminator(_row_kind),
]
RowT = TypeVar("RowT", Row, PairRow, PolicyRow)
# KINDS: how rows are called.
KINDS: dict[type, str] = {Row: "a text", PairRow: "a pair", PolicyRow: "a sample with logprobs"}


def rows_as(rows: Sequence[Any], kind: type[RowT], param: str) -> list[RowT]:
    """Return rows of one kind; raise InvalidRequestError if one is of another kind."""
    checked: list[RowT] = []
    for number, row in enumerate(rows):
        if not isinstance(row, kind):
            raise InvalidRequestError(
                f"{row.place(number, param)} is {KINDS[type(row)]}, and the objective reads "
                f"{KINDS[kind]} in each row.",
                param=param,
            )
        checked.append(row)
    return checked


#: ``Data`` is rows, or the id of a file of the caller with one row as JSON in each line.
Data = Annotated[
    Annotated[Name, Tag("<name>")]
    | Annotated[list[AnyRow], Field(min_length=1, max_length=MAX_ROWS), Tag("<list>")],
    Discriminator(kind_of),
]
