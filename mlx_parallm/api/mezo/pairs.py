"""From pairs and samples with advantages to examples, whose losses have a gradient alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from mlx_parallm.api.chat.schema import turns_of
from mlx_parallm.api.http.offload import in_thread
from mlx_parallm.api.mezo.prompts import checked, end_token
from mlx_parallm.api.mezo.rows import PairRow, PolicyRow, Said
from mlx_parallm.api.mezo.schema import Pairs
from mlx_parallm.api.pooling.inputs.encode import Reading
from mlx_parallm.api.pooling.scores.rewards import reward_inputs
from mlx_parallm.api.turns.history import template_messages
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.training.records import Example
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.gradients import LossTarget
from mlx_parallm.types.training import ChoiceInput

Turns = list[dict[str, object]]


async def pair_examples(
    rows: Sequence[PairRow],
    objective: Pairs,
    model: PoolingModel | GenerationModel,
    param: str,
) -> list[Example]:
    """Return examples of which the first text is preferred to the second.

    Raises:
        InvalidRequestError: both texts of a row are equal, or cannot be read; the message names it.
    """
    if isinstance(model, GenerationModel):
        return await in_thread(lambda: _choices(rows, objective, model, param))
    texts = [text for row in rows for text in _texts(row)]
    places = [row.place(number, param) for number, row in enumerate(rows) for _ in range(2)]
    for place, first, second in zip(places[::2], texts[::2], texts[1::2], strict=True):
        if first == second:
            raise _equal(place, param)
    reading = Reading(param=param, places=places)
    inputs = await reward_inputs(texts, model, "classify", reading, template_kwargs={})
    return [
        Example(first, 0, other=second, target=LossTarget(margin=row.margin))
        for row, first, second in zip(rows, inputs[::2], inputs[1::2], strict=True)
    ]


def _choices(
    rows: Sequence[PairRow], objective: Pairs, model: GenerationModel, param: str
) -> list[Example]:
    """Return two choices behind one prompt: what both begin with, which counts for neither."""
    end = end_token(model) if objective.ends else None
    examples: list[Example] = []
    for number, row in enumerate(rows):
        place = row.place(number, param)
        try:
            first, second = (_tokens(text, model, end) for text in _texts(row))
        except InvalidRequestError as problem:
            raise InvalidRequestError(f"{place}: {problem}", param=param) from None
        if first == second:
            raise _equal(place, param)
        pairs = zip(first[:-1], second[:-1], strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if not shared:
            raise InvalidRequestError(
                f"{place} has texts without a token before both; give them a prompt.", param=param
            )
        item = ChoiceInput(first[:shared], (first[shared:], second[shared:]))
        examples.append(Example(checked(item, model, place, param), 0))
    return examples


def _equal(place: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(f"{place} has two equal texts.", param=param)


def _texts(row: PairRow) -> tuple[str | Turns, str | Turns]:
    """Return both texts of a pair with its prompt, or both conversations."""
    assert row.chosen is not None, "the row was checked"
    assert row.rejected is not None, "the row was checked"
    every = (row.prompt, row.chosen, row.rejected)
    if all(isinstance(text, str) or text is None for text in every):
        return f"{row.prompt or ''}{row.chosen}", f"{row.prompt or ''}{row.rejected}"
    before = [] if row.prompt is None else _turns(row.prompt, "user")
    chosen, rejected = _turns(row.chosen, "assistant"), _turns(row.rejected, "assistant")
    return [*before, *chosen], [*before, *rejected]


def _turns(text: Said, role: str) -> Turns:
    return [{"role": role, "content": text}] if isinstance(text, str) else turns_of(text)


def _tokens(text: str | Turns, model: GenerationModel, end: int | None) -> tuple[int, ...]:
    if not isinstance(text, str):
        turns = template_messages(text, id_length=model.call_id_length)
        return tuple(model.tokenizer.encode_chat(turns, add_generation_prompt=False))
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
