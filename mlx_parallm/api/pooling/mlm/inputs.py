"""From texts with masks to what a masked LM reads, and from words to the ids they stand for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_parallm.api.http.offload import maybe_in_thread
from mlx_parallm.api.pooling.inputs.encode import Reading, single_inputs
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_mapping
from mlx_parallm.types.pooling import PoolingInput, Task
from mlx_parallm.types.request import TokenLimit

# To look up a word takes as long as to encode so many characters.
_WORD_CHARS = 16


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that are compared, each once.

    Attributes:
        ids: in the order they were given.
        labels: what each was asked for as.
        warnings: what was read as something else.
    """

    ids: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def mask_id(model: PoolingModel) -> int:
    """Return the id that stands for a word to be found.

    Raises:
        InvalidRequestError: the model's tokenizer has none.
    """
    token = model.tokenizer.mask_token
    known = None if token is None else model.tokenizer.token_id(token)
    if known is None:
        raise InvalidRequestError(f"{model.names[0]} has no mask token.", param="model")
    return known


async def masked_inputs(
    sources: Sequence[Any],
    model: PoolingModel,
    task: Task,
    reading: Reading,
    candidates: tuple[int, ...] = (),
    *,
    top_k: int = 0,
) -> tuple[PoolingInput, ...]:
    """Inputs whose places are their masks; see ``single_inputs`` and ``PoolingInput``.

    Raises:
        InvalidRequestError: a text has no mask, perhaps because it was cut.
        ContextLengthError: one is too long and is not to be cut.
    """
    mask = mask_id(model)
    inputs: list[PoolingInput] = []
    for number, each in enumerate(await single_inputs(sources, model, task, reading)):
        places = tuple(place for place, token in enumerate(each.token_ids) if token == mask)
        if not places:
            raise InvalidRequestError(
                f"{reading.param} {number} has no {model.tokenizer.mask_token}.",
                param=reading.param,
            )
        inputs.append(replace(each, places=places, candidates=candidates, top_k=top_k))
    return tuple(inputs)


async def candidates_of(
    words: Mapping[str, str | int] | Iterable[str], model: PoolingModel, param: str
) -> Candidates:
    """Return the ids of words, by the rule of transformers' fill-mask pipeline.

    A word that is no token is tokenised, and its first token stands for it. Among words with the
    same id, the first is kept.

    Args:
        words: tokens, words or ids; perhaps by their labels.
        model: whose vocabulary is meant.
        param: the field of the body that they came from.

    Raises:
        InvalidRequestError: an id is outside the vocabulary; no word is left.
    """
    labelled = _labelled(words)
    length = sum(len(str(word)) + _WORD_CHARS for word in labelled.values())
    return await maybe_in_thread(lambda: _candidates(labelled, model, param), length)


def _labelled(words: Mapping[str, str | int] | Iterable[str]) -> Mapping[str, str | int]:
    return words if is_mapping(words) else {word: word for word in words}


def _candidates(words: Mapping[str, str | int], model: PoolingModel, param: str) -> Candidates:
    labels: dict[int, str] = {}
    warnings: list[str] = []
    for label, word in words.items():
        number, warning = _candidate(word, model, param)
        warnings += [] if warning is None else [warning]
        if number is not None and labels.setdefault(number, label) != label:
            warnings.append(
                f"{label!r} and {labels[number]!r} are the same token; it is told once."
            )
    if not labels:
        raise InvalidRequestError(f"{param} has no word that can be read.", param=param)
    return Candidates(tuple(labels), tuple(labels.values()), tuple(warnings))


def _candidate(word: str | int, model: PoolingModel, param: str) -> tuple[int | None, str | None]:
    if isinstance(word, int):
        if not 0 <= word < model.info.vocab_size:
            raise InvalidRequestError(f"{param} has {word}, which is no token id.", param=param)
        return word, None
    number = model.tokenizer.token_id(word)
    if number is not None:
        return number, None
    limit = TokenLimit(most=1, cuts=True)
    (tokens,) = model.tokenizer.encode([word], add_special_tokens=False, limit=limit)
    if not tokens:
        return None, f"{word!r} is not in the vocabulary and is left out."
    token = model.tokenizer.token_string(tokens[0])
    return tokens[0], f"{word!r} is not in the vocabulary; its first token {token!r} is used."
