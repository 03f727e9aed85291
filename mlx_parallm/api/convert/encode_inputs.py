"""From texts, pairs of texts and token ids to what an encoder reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_parallm.api.offload import maybe_in_thread
from mlx_parallm.encode import EncodeInput, Task
from mlx_parallm.engine.interface import EncoderModel
from mlx_parallm.errors import ContextLengthError, InvalidRequestError


async def single_inputs(
    given: Sequence[Any],
    model: EncoderModel,
    task: Task,
    *,
    truncate: int | None = None,
    param: str = "input",
) -> tuple[EncodeInput, ...]:
    """Inputs of one text each.

    Args:
        given: texts, which get the model's special tokens; or token ids, taken as they are.
        model: reads them.
        task: of all.
        truncate: longer inputs are cut to so many tokens; -1: to what the model takes; None: they
            are refused.
        param: the field of the body that they came from.

    Raises:
        InvalidRequestError: an input is empty, or has ids that the model does not know.
        ContextLengthError: one is too long and is not to be cut.
    """
    if isinstance(given[0], str):
        found = await maybe_in_thread(
            lambda: model.tokenizer.encode(given), sum(len(text) for text in given)
        )
    else:
        found = [tuple(one) for one in given]
        _check_ids(found, model.info.vocab_size, param)
    limit = _limit(truncate, model.info.max_model_len)
    return tuple(
        EncodeInput(_fitting(ids, f"{param} {place}", truncate, limit, model, param), task)
        for place, ids in enumerate(found)
    )


async def pair_inputs(
    pairs: Sequence[tuple[str, str]],
    model: EncoderModel,
    task: Task = "classify",
    *,
    truncate: int | None = None,
    param: str = "documents",
) -> tuple[EncodeInput, ...]:
    """Inputs of two texts each, such as a query and a document; see ``single_inputs``.

    Of a pair that is too long the second text is cut.
    """
    found = await maybe_in_thread(
        lambda: model.tokenizer.encode_pairs(pairs), sum(len(a) + len(b) for a, b in pairs)
    )
    limit = _limit(truncate, model.info.max_model_len)
    return tuple(
        EncodeInput(_fitting(ids, f"{param} {place}", truncate, limit, model, param), task, second)
        for place, (ids, second) in enumerate(found)
    )


def _limit(asked: int | None, longest: int) -> int:
    if asked is None or asked == -1:
        return longest
    if not 1 <= asked <= longest:
        raise InvalidRequestError(
            f"truncate_prompt_tokens is -1 or from 1 to {longest}.", param="truncate_prompt_tokens"
        )
    return asked


def _check_ids(ids: Sequence[tuple[int, ...]], vocab_size: int, param: str) -> None:
    for place, one in enumerate(ids):
        if any(not 0 <= number < vocab_size for number in one):
            raise InvalidRequestError(
                f"{param} {place} has a token id outside the vocabulary of {vocab_size}.",
                param=param,
            )


def _fitting(
    ids: tuple[int, ...],
    name: str,
    truncate: int | None,
    limit: int,
    model: EncoderModel,
    param: str,
) -> tuple[int, ...]:
    if not ids:
        raise InvalidRequestError(f"{name} is empty.", param=param)
    if truncate is not None:
        return model.tokenizer.cut(ids, limit)
    if len(ids) > limit:
        raise ContextLengthError(
            limit,
            f"{name} has {len(ids)}. Shorten it, or set truncate_prompt_tokens.",
            param=param,
        )
    return ids
