"""Prompts: texts that precede the inputs of an embedder."""

from __future__ import annotations

from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import PoolingInfo

# SIDES: names of the two sides of a search in APIs and models: Cohere, NVIDIA, Voyage, Jina and
# sentence-transformers' ``encode_query`` and ``encode_document``.
SIDES = (
    ("query", "search_query", "retrieval.query"),
    ("document", "passage", "search_document", "retrieval.passage", "corpus"),
)
# OTHERS: further types of Cohere and Jina. Most models have no prompts for them.
OTHERS = frozenset({"classification", "clustering", "separation", "text-matching"})


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
