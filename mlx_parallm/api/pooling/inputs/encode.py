"""From texts, pairs of texts and token ids to inputs of a pooling model, with its prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_parallm.api.http.offload import maybe_in_thread
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import PoolingInfo, PoolingInput, Task
from mlx_parallm.types.token_limit import ANY_LENGTH, TokenLimit

# SIDES: names of the two sides of a search in APIs and models: Cohere, NVIDIA, Voyage, Jina and
# sentence-transformers' ``encode_query`` and ``encode_document``.
SIDES = (
    ("query", "search_query", "retrieval.query"),
    ("document", "passage", "search_document", "retrieval.passage", "corpus"),
)
# OTHERS: further types of Cohere and Jina. Most models have no prompts for them.
OTHERS = frozenset({"classification", "clustering", "separation", "text-matching"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Settings for reading a request's inputs.

    Attributes:
        truncate: longer inputs are cut to so many tokens; -1: to the model's limit; None: they are
            refused.
        from_left: True: cutting removes their beginnings.
        add_special_tokens: False: texts get no special tokens.
        param: the field of the body that they came from.
        places: see ``TokenLimit``.
    """

    truncate: int | None = None
    from_left: bool = False
    add_special_tokens: bool = True
    param: str = "input"
    places: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Settings for reading texts with a role, such as queries.

    Attributes:
        prompt: text before every text.
        marker: ids before a text, after the special tokens at its beginning.
        longest: most tokens of an input; None: the model's limit.
    """

    prompt: str = ""
    marker: tuple[int, ...] = ()
    longest: int | None = None


AS_IT_IS = Reading()
ANY_TEXT = Role()


async def single_inputs(
    sources: Sequence[Any],
    model: PoolingModel,
    task: Task,
    reading: Reading = AS_IT_IS,
    *,
    role: Role = ANY_TEXT,
) -> tuple[PoolingInput, ...]:
    """Return inputs of one text each.

    Args:
        sources: texts, which get the model's special tokens; or token ids, taken as they are.
        model: reads them.
        task: the task of all inputs.
        reading: how the request has them read.
        role: the role of the texts.

    Raises:
        InvalidRequestError: an input is empty, or has a token that the model has no vector for:
            an id that the request gives, or a token that only the tokenizer knows.
        ContextLengthError: an input is too long, and the request does not allow cutting.
    """
    limit = text_limit(model, reading, longest=role.longest)
    if not isinstance(sources[0], str):
        ids = [tuple(each) for each in sources]
        return tuple(PoolingInput(each, task) for each in _fitting(ids, model, limit))
    leaves_prompt = bool(role.prompt) and task == "embed" and not model.info.pools_prompts
    # The length of the whole text shows how much of the prompt is cut at the left.
    needs_all = leaves_prompt and limit.cuts and limit.from_left
    ids = await _encoded(sources, model, reading, role, ANY_LENGTH if needs_all else limit)
    fitting = _fitting(ids, model, limit)
    if not leaves_prompt:
        return tuple(PoolingInput(each, task) for each in fitting)
    (bare,) = model.tokenizer.encode([role.prompt], add_special_tokens=False)
    num_begin = len(model.tokenizer.begin_ids) if reading.add_special_tokens else 0
    inputs: list[PoolingInput] = []
    for whole, kept in zip(ids, fitting, strict=True):
        num_cut = len(whole) - len(kept) if limit.from_left else 0
        # At least one token of a text is pooled, even if cutting leaves only its prompt.
        num_unpooled = min(max(num_begin + len(bare) - num_cut, 0), len(kept) - 1)
        inputs.append(PoolingInput(kept, task, num_unpooled=num_unpooled))
    return tuple(inputs)


def ids_input(ids: tuple[int, ...], model: PoolingModel, task: Task, place: str) -> PoolingInput:
    """Return token ids as an input; raise as ``single_inputs`` does, by the name of its place."""
    if not ids:
        raise InvalidRequestError(f"{place} is empty.")
    TokenLimit(most=model.info.max_model_len).check(len(ids))
    _check_known(ids, model, place, None)
    return PoolingInput(ids, task)


async def _encoded(
    sources: Sequence[str], model: PoolingModel, reading: Reading, role: Role, limit: TokenLimit
) -> list[tuple[int, ...]]:
    """Return the ids of texts in their role."""
    texts = [role.prompt + text for text in sources] if role.prompt else sources
    has_special = reading.add_special_tokens
    ids = await maybe_in_thread(
        lambda: model.tokenizer.encode(texts, add_special_tokens=has_special, limit=limit),
        sum(len(text) for text in texts),
    )
    if not role.marker:
        return ids
    begin = len(model.tokenizer.begin_ids) if has_special else 0
    return [(*each[:begin], *role.marker, *each[begin:]) for each in ids]


async def pair_inputs(
    pairs: Sequence[tuple[str, str]], model: PoolingModel, reading: Reading
) -> tuple[PoolingInput, ...]:
    """Return inputs to classify, of two texts each, such as a query and a document.

    If a pair is too long, its second text is cut. See also ``single_inputs``.
    """
    limit = text_limit(model, replace(reading, from_left=False))
    encoded = await maybe_in_thread(
        lambda: model.tokenizer.encode_pairs(pairs, limit=limit),
        sum(len(a) + len(b) for a, b in pairs),
    )
    fitting = _fitting([ids for ids, _ in encoded], model, limit)
    return tuple(
        PoolingInput(ids, "classify", second)
        for ids, (_, second) in zip(fitting, encoded, strict=True)
    )


async def shortened_texts(texts: Sequence[str], model: PoolingModel, most: int) -> list[str]:
    """Return the beginnings of texts with at most so many tokens, not counting special ones."""
    limit = TokenLimit(most=most, cuts=True)

    def work() -> list[str]:
        tokens = model.tokenizer.spans(texts, add_special_tokens=False, limit=limit)
        return [
            text if len(spans) <= most else text[: spans[most - 1].end]
            for text, spans in zip(texts, tokens, strict=True)
        ]

    return await maybe_in_thread(work, sum(map(len, texts)))


def text_limit(model: PoolingModel, reading: Reading, *, longest: int | None = None) -> TokenLimit:
    """Return how many tokens of each text a model reads.

    Args:
        model: reads them.
        reading: how the request has them read.
        longest: most tokens of a text in its role; None: the model's limit.

    Raises:
        InvalidRequestError: ``truncate`` is out of range.
    """
    truncate, takes = reading.truncate, model.info.max_model_len
    most = min(longest or takes, takes)
    if truncate not in (None, -1):
        if not 1 <= truncate <= takes:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be -1, or from 1 to {takes}.",
                param="truncate_prompt_tokens",
            )
        most = min(truncate, most)
    return TokenLimit(
        most=most,
        cuts=truncate is not None,
        from_left=reading.from_left,
        name=reading.param,
        places=reading.places,
    )


def _fitting(
    inputs: Sequence[tuple[int, ...]], model: PoolingModel, limit: TokenLimit
) -> list[tuple[int, ...]]:
    """Return inputs cut to the limit.

    It refuses those that are too long, empty ones, and those with unknown tokens.
    """
    for place, ids in enumerate(inputs):
        if not ids:
            raise InvalidRequestError(f"{limit.place(place)} is empty.", param=limit.name)
        limit.check(len(ids), place)
        _check_known(ids, model, limit.place(place), limit.name)
    if not limit.cuts or limit.most is None:
        return list(inputs)
    cut = model.tokenizer.cut
    return [cut(ids, limit.most, from_left=limit.from_left) for ids in inputs]


def _check_known(ids: tuple[int, ...], model: PoolingModel, place: str, param: str | None) -> None:
    """Refuse ids that have no row in the embedding table: a lookup would read foreign memory.

    A tokenizer may have tokens that were added after the model was trained.
    """
    rows = model.info.vocab_size
    if min(ids) < 0 or max(ids) >= rows:
        unknown = next(number for number in ids if not 0 <= number < rows)
        raise InvalidRequestError(
            f"{place} has a token id outside the vocabulary of {rows}: {unknown}.",
            param=param,
        )


def named_prompt(info: PoolingInfo, name: str | None) -> str:
    """Return the prompt of this name, the default one if it is None; "" if there is no default.

    Raises:
        InvalidRequestError: the model has no prompt of this name.
    """
    chosen = info.default_prompt if name is None else name
    if chosen is None:
        return ""
    if chosen not in info.prompts:
        raise _refusal("prompt_name", chosen, info)
    return info.prompts[chosen]


def prompt_of_type(info: PoolingInfo, input_type: str) -> str:
    """Return the prompt for inputs of this type, by any of the names that the type has.

    A model without such a prompt treats them as any other text.

    Raises:
        InvalidRequestError: the type is unknown; or the model has prompts, and none for it.
    """
    side = next((names for names in SIDES if input_type in names), ())
    for name in (input_type, *side):
        if name in info.prompts:
            return info.prompts[name]
    if not side and (info.prompts or input_type not in OTHERS):
        raise _refusal("input_type", input_type, info)
    return named_prompt(info, None)


def _refusal(field: str, name: str, info: PoolingInfo) -> InvalidRequestError:
    known = ", ".join(sorted(info.prompts)[:50]) or "none"
    return InvalidRequestError(
        f"The model has no prompt for {name[:64]!r}; its prompts: {known}.", param=field
    )
