"""From the lines of a job's files to examples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, StrictBool, StrictStr

from mlx_parallm.api.chat.schema import ChatMessage
from mlx_parallm.api.http.forms import NullIsAbsent
from mlx_parallm.api.mezo.conversations import conversation_input
from mlx_parallm.api.mezo.pairs import pair_reader
from mlx_parallm.api.mezo.prompts import completion_tokens, end_token
from mlx_parallm.api.mezo.rows import PairRow
from mlx_parallm.api.mezo.schema import Completion, Pairs
from mlx_parallm.api.mezo.stored_lines import lines_of, parsed_lines
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.training.records import Example
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.training import ChoiceInput, TrainingInput

#: ``ReadLine``: returns an example from the JSON value of a line; raises ValidationError or
#: InvalidRequestError.
ReadLine = Callable[[Any], Example]


class ConversationLine(NullIsAbsent):
    """A line of a supervised job's file."""

    model_config = ConfigDict(extra="forbid")

    messages: list[ChatMessage] | None = Field(None, min_length=1)
    tools: list[dict[str, Any]] | None = None
    parallel_tool_calls: StrictBool | None = None
    prompt: StrictStr | None = None
    completion: StrictStr | None = None


def line_reader(
    objective: Completion | Pairs, model: PoolingModel | GenerationModel, max_tokens: int
) -> ReadLine:
    """Return what reads a line of a job's file: conversations and completions, or pairs.

    Args:
        objective: what the job learns.
        model: reads texts; it generates unless pairs are learnt.
        max_tokens: most tokens of a text.
    """
    if isinstance(objective, Pairs):
        read_pair = pair_reader(objective, model)
        return lambda value: _checked(read_pair(PairRow.model_validate(value)), max_tokens)
    assert isinstance(model, GenerationModel), "completions are generated"
    generator = model
    return lambda value: _checked(_completed(value, generator), max_tokens)


def file_examples(path: Path, read: ReadLine, field: str) -> list[Example]:
    """Return the examples of a file.

    Args:
        path: a file of JSON lines.
        read: reads a line.
        field: the field of the body that names the file, for errors.

    Raises:
        InvalidRequestError: a line cannot be used; the message has its number, from 1.
    """
    return parsed_lines(lines_of(path), lambda value, _: read(value), param=field, what="examples")


def _checked(example: Example, max_tokens: int) -> Example:
    count = max(map(_num_tokens, example.inputs))
    if count > max_tokens:
        raise InvalidRequestError(f"it has {count} tokens, and {max_tokens} are allowed")
    return example


def _num_tokens(item: TrainingInput) -> int:
    """Return how many tokens the longest text of an input has."""
    choices = item.choices if isinstance(item, ChoiceInput) else ()
    return len(item.token_ids) + max(map(len, choices), default=0)


def _completed(value: Any, model: GenerationModel) -> Example:
    """Return a conversation, or a prompt with its completion, as an example."""
    line = ConversationLine.model_validate(value)
    if line.messages is not None:
        if line.prompt is not None or line.completion is not None:
            raise InvalidRequestError("it has messages and a prompt or a completion")
        return Example(conversation_input(line.messages, line.tools, model), 0)
    if line.prompt is None or line.completion is None:
        raise InvalidRequestError("it needs messages, or a prompt and a completion")
    return Example(_completion_input(line.prompt, line.completion, model), 0)


def _completion_input(prompt: str, completion: str, model: GenerationModel) -> ChoiceInput:
    """Return a prompt with its completion, which an end token follows."""
    if not completion:
        raise InvalidRequestError("completion is empty")
    completed = completion_tokens(completion, end_token(model), model)
    prompted = tuple(model.tokenizer.encode(prompt))
    if not prompted or not completed:
        raise InvalidRequestError("the prompt or the completion has no token")
    return ChoiceInput(prompted, (completed,), averages=True)
