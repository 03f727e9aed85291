"""From texts, pairs of texts and token ids to what an encoder reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_parallm.api.http.offload import maybe_in_thread
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import EncodeInput, Task
from mlx_parallm.types.request import ANY_LENGTH, TokenLimit


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """How texts are read that are for something, such as queries.

    Attributes:
        prompt: is put before every text.
        marker: ids that are put before a text, after the special tokens at its beginning.
        longest: most tokens of an input; None: what the model takes.
    """

    prompt: str = ""
    marker: tuple[int, ...] = ()
    longest: int | None = None


ANY_TEXT = Role()


async def single_inputs(
    given: Sequence[Any],
    model: PoolingModel,
    task: Task,
    *,
    truncate: int | None = None,
    from_left: bool = False,
    add_special_tokens: bool = True,
    role: Role = ANY_TEXT,
    param: str = "input",
) -> tuple[EncodeInput, ...]:
    """Inputs of one text each.

    Args:
        given: texts, which get the model's special tokens; or token ids, taken as they are.
        model: reads them.
        task: of all.
        truncate: longer inputs are cut to so many tokens; -1: to what the model takes; None: they
            are refused.
        from_left: they are cut at their beginnings.
        add_special_tokens: false: texts get none.
        role: what the texts are for.
        param: the field of the body that they came from.

    Raises:
        InvalidRequestError: an input is empty, or has ids that the model does not know.
        ContextLengthError: one is too long and is not to be cut.
    """
    num_unpooled = 0
    limit = text_limit(model, truncate, param, from_left=from_left, longest=role.longest)
    if isinstance(given[0], str):
        leaves_prompt = role.prompt and task == "embed" and not model.info.pools_prompts
        # How much of the prompt is cut at the left tells the length of the whole text.
        needs_all = leaves_prompt and limit.cuts and from_left
        found = await _encoded(
            given,
            model,
            role,
            add_special_tokens=add_special_tokens,
            limit=ANY_LENGTH if needs_all else limit,
        )
        if leaves_prompt:
            (bare,) = model.tokenizer.encode([role.prompt], add_special_tokens=False)
            num_unpooled = len(bare)
            num_unpooled += len(model.tokenizer.begin_ids) if add_special_tokens else 0
    else:
        found = [tuple(one) for one in given]
        _check_ids(found, model.info.vocab_size, param)
    fit = _Fit(model, limit, param)
    inputs = []
    for place, ids in enumerate(found):
        fitting = fit(ids, place)
        num_gone = len(ids) - len(fitting) if from_left else 0
        # One token at least is left of a text that is cut to its prompt.
        unpooled = min(max(num_unpooled - num_gone, 0), len(fitting) - 1)
        inputs.append(EncodeInput(fitting, task, num_unpooled=unpooled))
    return tuple(inputs)


async def _encoded(
    given: Sequence[str],
    model: PoolingModel,
    role: Role,
    *,
    add_special_tokens: bool,
    limit: TokenLimit,
) -> list[tuple[int, ...]]:
    """The ids of texts in their role."""
    texts = [role.prompt + text for text in given] if role.prompt else given
    found = await maybe_in_thread(
        lambda: model.tokenizer.encode(texts, add_special_tokens=add_special_tokens, limit=limit),
        sum(len(text) for text in texts),
    )
    if not role.marker:
        return found
    begin = len(model.tokenizer.begin_ids) if add_special_tokens else 0
    return [(*one[:begin], *role.marker, *one[begin:]) for one in found]


async def pair_inputs(
    pairs: Sequence[tuple[str, str]],
    model: PoolingModel,
    task: Task = "classify",
    *,
    truncate: int | None = None,
    param: str = "documents",
) -> tuple[EncodeInput, ...]:
    """Inputs of two texts each, such as a query and a document; see ``single_inputs``.

    Of a pair that is too long the second text is cut.
    """
    limit = text_limit(model, truncate, param)
    found = await maybe_in_thread(
        lambda: model.tokenizer.encode_pairs(pairs, limit=limit),
        sum(len(a) + len(b) for a, b in pairs),
    )
    fit = _Fit(model, limit, param)
    return tuple(
        EncodeInput(fit(ids, place), task, second) for place, (ids, second) in enumerate(found)
    )


async def shortened_texts(texts: Sequence[str], model: PoolingModel, most: int) -> list[str]:
    """Return the beginnings of texts that have so many tokens, special ones not counted."""
    limit = TokenLimit(most=most, cuts=True)

    def work() -> list[str]:
        found = model.tokenizer.spans(texts, add_special_tokens=False, limit=limit)
        return [
            text if len(spans) <= most else text[: spans[most - 1].end]
            for text, spans in zip(texts, found, strict=True)
        ]

    return await maybe_in_thread(work, sum(map(len, texts)))


def _check_ids(ids: Sequence[tuple[int, ...]], vocab_size: int, param: str) -> None:
    for place, one in enumerate(ids):
        if any(not 0 <= number < vocab_size for number in one):
            raise InvalidRequestError(
                f"{param} {place} has a token id outside the vocabulary of {vocab_size}.",
                param=param,
            )


def text_limit(
    model: PoolingModel,
    truncate: int | None,
    param: str,
    *,
    from_left: bool = False,
    longest: int | None = None,
) -> TokenLimit:
    """How many tokens of each text a model reads; see ``single_inputs``.

    Args:
        model: reads them.
        truncate: see ``single_inputs``.
        param: the field of the body that they came from.
        from_left: see ``single_inputs``.
        longest: most tokens of a text in its role; None: what the model takes.

    Raises:
        InvalidRequestError: ``truncate`` is out of range.
    """
    most = min(longest or model.info.max_model_len, model.info.max_model_len)
    if truncate not in (None, -1):
        if not 1 <= truncate <= model.info.max_model_len:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is -1 or from 1 to {model.info.max_model_len}.",
                param="truncate_prompt_tokens",
            )
        most = min(truncate, most)
    return TokenLimit(most=most, cuts=truncate is not None, from_left=from_left, name=param)


class _Fit:
    """Cuts or refuses inputs that are too long; see ``single_inputs``."""

    def __init__(self, model: PoolingModel, limit: TokenLimit, param: str) -> None:
        self._cut = model.tokenizer.cut
        self._limit = limit
        self._param = param

    def __call__(self, ids: tuple[int, ...], place: int) -> tuple[int, ...]:
        """The input at a place of the request as the model can take it."""
        if not ids:
            raise InvalidRequestError(f"{self._param} {place} is empty.", param=self._param)
        limit = self._limit
        limit.check(len(ids), place)
        if limit.cuts and limit.most is not None:
            return self._cut(ids, limit.most, from_left=limit.from_left)
        return ids
