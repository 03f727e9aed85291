"""From pairs and samples with advantages to examples, whose losses have a gradient alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import dropwhile, takewhile
from typing import Any

from mlx_parallm.api.chat.schema import turns_of
from mlx_parallm.api.http.offload import in_thread
from mlx_parallm.api.mezo.prompts import checked, end_token
from mlx_parallm.api.mezo.rows import PairRow, PolicyRow, Said
from mlx_parallm.api.mezo.schema import Pairs
from mlx_parallm.api.pooling.inputs.encode import ids_input
from mlx_parallm.api.turns.history import template_messages
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.template_time import at_one_time
from mlx_parallm.training.records import Example
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.gradients import LossTarget
from mlx_parallm.types.token_limit import TokenLimit
from mlx_parallm.types.training import ChoiceInput

Turns = list[dict[str, object]]
Tools = Sequence[Mapping[str, Any]] | None
#: ``PAIR``: what a row is called in the errors of its texts.
PAIR = "the pair"


async def pair_examples(
    rows: Sequence[PairRow],
    objective: Pairs,
    model: PoolingModel | GenerationModel,
    param: str,
) -> list[Example]:
    """Return examples of which the first text is preferred to the second.

    Raises:
        InvalidRequestError: see ``pair_reader``; the message names the row.
    """
    read = pair_reader(objective, model)

    def work() -> list[Example]:
        examples: list[Example] = []
        for number, row in enumerate(rows):
            try:
                examples.append(read(row))
            except InvalidRequestError as problem:
                place = row.place(number, param)
                raise InvalidRequestError(f"{place}: {problem}", param=param) from None
        return examples

    return await in_thread(work)


def pair_reader(
    objective: Pairs, model: PoolingModel | GenerationModel
) -> Callable[[PairRow], Example]:
    """Return what reads a pair: as two choices behind a prompt, or as two texts that get a score.

    It raises InvalidRequestError if the texts are equal, or cannot be read.
    """
    if isinstance(model, GenerationModel):
        end = end_token(model) if objective.ends else None
        return lambda row: _choice(row, model, end)
    return lambda row: _scored(row, model)


@at_one_time()
def _scored(row: PairRow, model: PoolingModel) -> Example:
    first, second = (
        ids_input(_ids(text, row.tools, model), model, "classify", PAIR) for text in _texts(row)
    )
    _check_different(first, second)
    return Example(first, 0, other=second, target=LossTarget(margin=row.margin))


def _ids(text: str | Turns, tools: Tools, model: PoolingModel) -> tuple[int, ...]:
    limit = TokenLimit(most=model.info.max_model_len)
    if isinstance(text, str):
        return model.tokenizer.encode([text], limit=limit)[0]
    variables = {} if tools is None else {"tools": tools}
    return model.tokenizer.encode_chat(
        template_messages(text),
        add_generation_prompt=False,
        template_kwargs=variables,
        limit=limit,
    )


@at_one_time()
def _choice(row: PairRow, model: GenerationModel, end: int | None) -> Example:
    """Return two choices behind one prompt: what both begin with, which counts for neither."""
    first, second = (_tokens(text, row.tools, model, end) for text in _texts(row))
    _check_different(first, second)
    pairs = zip(first[:-1], second[:-1], strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if not shared:
        raise InvalidRequestError(f"{PAIR} has no token before both texts: give them a prompt")
    item = ChoiceInput(first[:shared], (first[shared:], second[shared:]))
    return Example(checked(item, model, PAIR, None), 0)


def _check_different(first: object, second: object) -> None:
    if first == second:
        raise InvalidRequestError(f"{PAIR} has two equal texts")


def _texts(row: PairRow) -> tuple[str | Turns, str | Turns]:
    """Return both texts of a pair with its prompt, or both conversations; see ``_conversation``."""
    assert row.chosen is not None, "the row was checked"
    assert row.rejected is not None, "the row was checked"
    _check_different(row.chosen, row.rejected)
    every = (row.prompt, row.chosen, row.rejected)
    if all(isinstance(text, str) or text is None for text in every):
        return f"{row.prompt or ''}{row.chosen}", f"{row.prompt or ''}{row.rejected}"
    return (
        _conversation(row.prompt, "chosen", row.chosen),
        _conversation(row.prompt, "rejected", row.rejected),
    )


def _conversation(prompt: Said | None, name: str, answer: Said) -> Turns:
    """Return an answer behind its prompt, which the answer may begin with already, as TRL writes.

    Raises:
        InvalidRequestError: it begins with other turns than a prompt that is a text.
    """
    before, turns = _turns(prompt or [], "user"), _turns(answer, "assistant")
    # The prompt may leave out a system prompt that the whole conversation has.
    own = list(dropwhile(_is_system, turns)) if not any(map(_is_system, before)) else turns
    if before and list(map(_trimmed, own[: len(before)])) == list(map(_trimmed, before)):
        return turns
    if before and isinstance(prompt, str) and turns[0]["role"] != "assistant":
        raise InvalidRequestError(
            f"{name} begins neither with a user's turn that is the prompt nor with an assistant's"
        )
    return [*before, *turns]


def _is_system(turn: dict[str, object]) -> bool:
    return turn["role"] == "system"


def _trimmed(turn: dict[str, object]) -> dict[str, object]:
    return turn | {"content": str(turn["content"]).strip()}


def _turns(text: Said, role: str) -> Turns:
    return [{"role": role, "content": text}] if isinstance(text, str) else turns_of(text)


def _tokens(
    text: str | Turns, tools: Tools, model: GenerationModel, end: int | None
) -> tuple[int, ...]:
    if not isinstance(text, str):
        turns = template_messages(text, id_length=model.call_id_length)
        return tuple(model.tokenizer.encode_chat(turns, tools=tools, add_generation_prompt=False))
    return (*model.tokenizer.encode(text), *(() if end is None else (end,)))


def policy_examples(rows: Sequence[PolicyRow], model: GenerationModel, param: str) -> list[Example]:
    """Return samples; raise InvalidRequestError if a token is unknown, or there are too many."""
    examples: list[Example] = []
    for number, row in enumerate(rows):
        count = len(row.completion_ids)
        item = ChoiceInput(
            tuple(row.token_ids),
            (tuple(row.completion_ids),),
            weights=(tuple(row.weights or [1 / count] * count),),
            by_token=True,
        )
        target = LossTarget(
            logprobs=tuple(row.logprobs),
            advantage=row.advantage,
            reference=tuple(row.ref_logprobs or ()),
        )
        place = row.place(number, param)
        examples.append(Example(checked(item, model, place, param), 0, target=target))
    return examples
