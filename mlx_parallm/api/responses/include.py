"""``include`` of routes that return stored items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import Depends, Query

from mlx_parallm.api.responses.items import Item, sealed
from mlx_parallm.api.responses.schema import ENCRYPTED_REASONING, LOGPROBS, Includable


async def get_include(
    include: Annotated[
        list[Includable] | None,
        Query(
            description=f"Further parts of the items: {LOGPROBS}, {ENCRYPTED_REASONING}; others "
            "have no effect."
        ),
    ] = None,
    include_too: Annotated[
        list[Includable] | None, Query(alias="include[]", description="The same.")
    ] = None,
) -> Sequence[str]:
    """Return the parts that a query includes; OpenAI's SDK writes brackets behind the name."""
    return [*(include or ()), *(include_too or ())]


IncludeDep = Annotated[Sequence[str], Depends(get_include)]


def shown(item: Item, include: Sequence[str]) -> Item:
    """Return an item with the parts that a request includes, and without the others."""
    if item.get("encrypted_content") and item["type"] == "reasoning":
        return item if ENCRYPTED_REASONING in include else item | {"encrypted_content": None}
    if item["type"] == "message" and LOGPROBS not in include:
        return item | {"content": [_without_logprobs(part) for part in item["content"]]}
    return with_reasoning(item, include)


def with_reasoning(item: Item, include: Sequence[str]) -> Item:
    """Return an item with its encrypted reasoning, if a request includes that."""
    if item["type"] != "reasoning" or ENCRYPTED_REASONING not in include:
        return item
    text = "".join(part["text"] for part in item["content"])
    is_missing = text and not item.get("encrypted_content")
    return item | {"encrypted_content": sealed(text)} if is_missing else item


def _without_logprobs(part: Item) -> Item:
    return part | {"logprobs": []} if part["type"] == "output_text" else part
