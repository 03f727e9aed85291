"""From rows of data to prompts of a generation model, and ways to continue them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from mlx_parallm.api.chat.schema import ChatMessage, turns_of
from mlx_parallm.api.http.offload import in_thread
from mlx_parallm.api.mezo.conversations import conversation_input
from mlx_parallm.api.mezo.rows import Row
from mlx_parallm.api.mezo.schema import Candidates, Completion
from mlx_parallm.api.turns.history import template_messages
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.training.records import Example
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.training import ChoiceInput

TEXT = "{text}"
Choices = tuple[tuple[int, ...], ...]


async def prompt_examples(
    rows: Sequence[Row], objective: Candidates | Completion, model: GenerationModel, param: str
) -> list[Example]:
    """Return examples for a model that generates.

    Args:
        rows: the rows.
        objective: how they are read.
        model: reads them.
        param: the field of the body that they came in, for errors.

    Raises:
        InvalidRequestError: a row, a candidate or a token cannot be used, or is too long; the
            message names it.
    """
    if isinstance(objective, Candidates):
        return await in_thread(lambda: _choosing(rows, objective, model, param))
    return await in_thread(lambda: _completing(rows, objective, model, param))


def _choosing(
    rows: Sequence[Row], objective: Candidates, model: GenerationModel, param: str
) -> list[Example]:
    names = list(objective.candidates)
    choices = _candidates(objective, model)
    examples: list[Example] = []
    for number, row in enumerate(rows):
        place = row.place(number, param)
        if row.completion is not None:
            raise InvalidRequestError(
                f"{place} has a completion; the objective candidates has labels.", param=param
            )
        label = row.label_index(names, place, param)
        prompt = _prompt(row, objective.template, model, place, param)
        item = ChoiceInput(prompt, choices, averages=bool(objective.normalize))
        examples.append(Example(checked(item, model, place, param), label))
    return examples


def _completing(
    rows: Sequence[Row], objective: Completion, model: GenerationModel, param: str
) -> list[Example]:
    end = end_token(model) if objective.ends else None
    examples: list[Example] = []
    for number, row in enumerate(rows):
        place = row.place(number, param)
        if row.label is not None:
            raise InvalidRequestError(f"{place} must have a completion, and no label.", param=param)
        if row.completion is not None:
            item = _completed(row, objective.template, end, model, place, param)
        elif row.messages is not None:
            item = _conversation(row, row.messages, model, place, param)
        else:
            raise InvalidRequestError(f"{place} must have a completion.", param=param)
        examples.append(Example(checked(item, model, place, param), 0))
    return examples


def _completed(
    row: Row, template: str, end: int | None, model: GenerationModel, place: str, param: str
) -> ChoiceInput:
    """Return a row's prompt with its completion."""
    completion = completion_tokens(row.completion or (), end, model)
    if not row.completion or not completion:
        raise InvalidRequestError(f"{place} has an empty completion.", param=param)
    if row.weights is not None and len(row.weights) != len(completion):
        raise InvalidRequestError(
            f"{place} has {len(row.weights)} weights for the {len(completion)} tokens of its "
            "completion, the end token included.",
            param=param,
        )
    prompt = _prompt(row, template, model, place, param)
    weights = () if row.weights is None else (tuple(row.weights),)
    return ChoiceInput(prompt, (completion,), averages=row.weights is None, weights=weights)


def _conversation(
    row: Row, messages: Sequence[ChatMessage], model: GenerationModel, place: str, param: str
) -> ChoiceInput:
    """Return a whole conversation, of which the assistant's messages are learnt."""
    if row.weights is not None:
        raise InvalidRequestError(
            f"{place} has weights and no completion; messages have a weight each.", param=param
        )
    try:
        return conversation_input(messages, row.tools, model)
    except InvalidRequestError as problem:
        raise InvalidRequestError(f"{place}: {problem}.", param=param) from None


def end_token(model: GenerationModel) -> int | None:
    """Return the token that ends what is learnt; None if the model has none."""
    return min(model.tokenizer.eos_ids, default=None)


def completion_tokens(
    completion: str | Sequence[int], end: int | None, model: GenerationModel
) -> tuple[int, ...]:
    """Return the tokens of a completion; token ids stay as they are."""
    if not isinstance(completion, str):
        return tuple(completion)
    tokens = model.tokenizer.encode(completion, add_special_tokens=False)
    return (*tokens, *(() if end is None else (end,)))


def _candidates(objective: Candidates, model: GenerationModel) -> Choices:
    """Return the tokens of each candidate."""
    param = "objective.candidates"
    choices: list[tuple[int, ...]] = []
    for label, candidate in objective.candidates.items():
        if isinstance(candidate, str):
            tokens = model.tokenizer.encode(candidate, add_special_tokens=False)
        else:
            tokens = candidate
        if not tokens:
            raise InvalidRequestError(
                f"The candidate of {label[:100]!r} has no token.", param=param
            )
        choices.append(tuple(tokens))
    if len(set(choices)) < len(choices):
        raise InvalidRequestError("Two candidates have the same tokens.", param=param)
    unknown = [token for tokens in choices for token in tokens if not _is_known(token, model)]
    if unknown:
        raise InvalidRequestError(f"{unknown[0]} is no token of the model.", param=param)
    return tuple(choices)


def _prompt(
    row: Row, template: str, model: GenerationModel, place: str, param: str
) -> tuple[int, ...]:
    if row.token_ids is not None:
        return tuple(row.token_ids)
    try:
        if row.messages is None:
            return tuple(model.tokenizer.encode(template.replace(TEXT, row.text or "")))
        turns = template_messages(turns_of(row.messages), id_length=model.call_id_length)
        return tuple(model.tokenizer.encode_chat(turns, tools=row.tools))
    except InvalidRequestError as problem:
        raise InvalidRequestError(f"{place}: {problem}", param=param) from None


def encoded_prompt(
    row: Row, template: str, model: GenerationModel, place: str, param: str
) -> ChoiceInput:
    """Return a row as a prompt without continuations.

    Raises:
        InvalidRequestError: it has no tokens, or others than the model knows, or too many.
    """
    return checked(
        ChoiceInput(_prompt(row, template, model, place, param), ()), model, place, param
    )


def checked(
    item: ChoiceInput, model: GenerationModel, place: str, param: str | None
) -> ChoiceInput:
    """Return an input; raise InvalidRequestError if the model cannot read it."""
    if not item.token_ids:
        raise InvalidRequestError(f"{place} has a prompt without a token.", param=param)
    longest = len(item.token_ids) + max(map(len, item.choices), default=0)
    if longest > model.max_model_len:
        raise InvalidRequestError(
            f"{place} has {longest} tokens, and the model takes {model.max_model_len}.", param=param
        )
    tokens = chain(item.token_ids, *item.choices)
    unknown = [token for token in tokens if not _is_known(token, model)]
    if unknown:
        raise InvalidRequestError(f"{place} has {unknown[0]}, which is no token.", param=param)
    return item


def _is_known(token: int, model: GenerationModel) -> bool:
    return 0 <= token < model.info.vocab_size
