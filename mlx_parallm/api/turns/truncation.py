"""Conversations that are too long for a model, without their oldest messages."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlx_parallm.api.turns.images import Images, image_sources
from mlx_parallm.api.turns.prepare import PreparedTurn, prepare_turn, render_turn
from mlx_parallm.api.turns.request import TurnRequest
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.template_time import at_one_time
from mlx_parallm.types.errors import ContextLengthError


async def prepare_fitting(
    turn: TurnRequest, model: GenerationModel, images: Images | None = None
) -> PreparedTurn:
    """Return the turn with as few of its oldest messages left out as make it fit the context.

    System messages stay, and what is left begins with a user's message, as templates want it. What
    does not fit even so is left as short as it can be. A conversation with images is not cut.

    Raises:
        InvalidRequestError: see ``prepare_turn``.
    """
    if image_sources(turn.messages):
        return await prepare_turn(turn, model, images)
    space = model.info.max_model_len - (turn.params.max_tokens or 1)
    with at_one_time():
        with contextlib.suppress(ContextLengthError):
            prepared = await prepare_turn(turn, model)
            if len(prepared.prompt_ids) <= space:
                return prepared
        return await prepare_turn(await _shortened(turn, model, space), model)


async def _shortened(turn: TurnRequest, model: GenerationModel, space: int) -> TurnRequest:
    cuts = _cuts(turn.messages)
    low, high = 0, len(cuts) - 1
    # The fewer messages, the shorter: the first cut that fits is found by halving.
    while low < high:
        middle = (low + high) // 2
        shorter = _without(turn, cuts[middle])
        if await _fits(shorter, model, space):
            high = middle
        else:
            low = middle + 1
    return _without(turn, cuts[low])


async def _fits(turn: TurnRequest, model: GenerationModel, space: int) -> bool:
    try:
        return len((await render_turn(turn, model)).token_ids) <= space
    except ContextLengthError:
        return False


def _cuts(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return where a conversation can begin: at its first message, or a later one of the user."""
    return [0, *(i for i, message in enumerate(messages) if i and message["role"] == "user")]


def _without(turn: TurnRequest, begin: int) -> TurnRequest:
    kept = [
        message
        for number, message in enumerate(turn.messages)
        if number >= begin or message["role"] == "system"
    ]
    return replace(turn, messages=kept)
