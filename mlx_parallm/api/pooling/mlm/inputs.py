"""From texts with masks to the inputs of a masked LM, and from words to their ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_parallm.api.http.offload import maybe_in_thread
from mlx_parallm.api.pooling.inputs.encode import Reading, single_inputs, text_limit
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_mapping
from mlx_parallm.types.pooling import PoolingInput, Task
from mlx_parallm.types.token_limit import TokenLimit

# _WORD_CHARS: characters that can be encoded in the time of looking up a word.
_WORD_CHARS = 16
#: ``MASK`` stands for every model's mask token, whatever that is.
MASK = "[MASK]"
# LEAST_TOP_K: fewest tokens that the model reports for a mask.
LEAST_TOP_K = 16


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that are compared, each once.

    Attributes:
        ids: the tokens, in the order of the request.
        labels: the request's name of each token.
        warnings: sentences about words that were read in another way than they were written.
    """

    ids: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def mask_id(model: PoolingModel) -> int:
    """Return the id of the mask token.

    Raises:
        InvalidRequestError: the tokenizer has no mask token, or the model no vector for it.
    """
    token = model.tokenizer.mask_token
    known = None if token is None else model.tokenizer.token_id(token)
    if known is None or known >= model.info.vocab_size:
        raise InvalidRequestError(f"{model.names[0]} has no mask token.", param="model")
    return known


def with_own_mask(text: str, model: PoolingModel) -> str:
    """Return a text in which ``[MASK]`` is written as the model's own mask token."""
    own = model.tokenizer.mask_token
    return text if own is None else text.replace(MASK, own)


def num_masks(text: str, model: PoolingModel) -> int:
    """Return how many masks a text has, written as ``[MASK]`` or as the model's own token."""
    return with_own_mask(text, model).count(model.tokenizer.mask_token or MASK)


async def masked_inputs(
    sources: Sequence[Any],
    model: PoolingModel,
    task: Task,
    reading: Reading,
    candidates: tuple[int, ...] = (),
    *,
    top_k: int = 0,
) -> tuple[PoolingInput, ...]:
    """Return inputs whose places are their masks; see ``single_inputs`` and ``PoolingInput``.

    Args:
        sources: texts, whose masks are ``[MASK]`` or the model's own, or token ids.
        model: reads them.
        task: the task of all.
        reading: how the request has them read.
        candidates: ids that are compared; none: the whole vocabulary.
        top_k: for ``mlm_top``: how many tokens of each mask the answer needs.

    Raises:
        InvalidRequestError: a text has no mask, which cutting may have removed.
        ContextLengthError: a text is too long, and the request does not allow cutting.
    """
    mask = mask_id(model)
    # A few numbers of tokens serve all requests, which can then share results.
    rounded = max(LEAST_TOP_K, 1 << (top_k - 1).bit_length()) if task == "mlm_top" else 0
    kept = min(rounded, model.info.vocab_size)
    inputs: list[PoolingInput] = []
    written = [with_own_mask(each, model) if isinstance(each, str) else each for each in sources]
    limit = text_limit(model, reading)
    for number, each in enumerate(await single_inputs(written, model, task, reading)):
        places = tuple(place for place, token in enumerate(each.token_ids) if token == mask)
        if not places:
            raise InvalidRequestError(
                f"{limit.place(number)} has no {MASK}, which may be written as "
                f"{model.tokenizer.mask_token}.",
                param=reading.param,
            )
        inputs.append(replace(each, places=places, candidates=candidates, top_k=kept))
    return tuple(inputs)


async def candidates_of(
    words: Mapping[str, str | int] | Iterable[str] | None, model: PoolingModel, param: str
) -> Candidates:
    """Return the ids of words, by the rule of transformers' fill-mask pipeline; none for None.

    A word that is no token is tokenised, and its first token stands for it. Among words with the
    same id, the first is kept.

    Args:
        words: tokens, words or ids; with labels as a mapping.
        model: has the vocabulary.
        param: the field of the body that they came from.

    Raises:
        InvalidRequestError: an id is outside the vocabulary, or no word is left.
    """
    if words is None:
        return Candidates()
    labelled = words if is_mapping(words) else {word: word for word in words}
    length = sum(len(str(word)) + _WORD_CHARS for word in labelled.values())
    return await maybe_in_thread(lambda: _candidates(labelled, model, param), length)


def _candidates(words: Mapping[str, str | int], model: PoolingModel, param: str) -> Candidates:
    labels: dict[int, str] = {}
    warnings: list[str] = []
    for label, word in words.items():
        number, warning = _candidate(word, model, param)
        warnings += [] if warning is None else [warning]
        if number is not None and labels.setdefault(number, label) != label:
            warnings.append(
                f"{label!r} and {labels[number]!r} are the same token; it is returned once."
            )
    if not labels:
        raise InvalidRequestError(f"{param} has no words.", param=param)
    return Candidates(tuple(labels), tuple(labels.values()), tuple(warnings))


def _candidate(word: str | int, model: PoolingModel, param: str) -> tuple[int | None, str | None]:
    number, warning = (word, None) if isinstance(word, int) else _token_of(word, model)
    if number is not None and not 0 <= number < model.info.vocab_size:
        raise InvalidRequestError(
            f"{param} has {word!r}, which is not a token of the model.", param=param
        )
    return number, warning


def _token_of(word: str, model: PoolingModel) -> tuple[int | None, str | None]:
    number = model.tokenizer.token_id(word)
    if number is not None:
        return number, None
    limit = TokenLimit(most=1, cuts=True)
    (tokens,) = model.tokenizer.encode([word], add_special_tokens=False, limit=limit)
    if not tokens:
        return None, f"{word!r} is not in the vocabulary and is left out."
    token = model.tokenizer.token_string(tokens[0])
    return tokens[0], f"{word!r} is not in the vocabulary; its first token {token!r} is used."
