"""A step's events on their way to another process, made small: there is one for every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_parallm.engine.interface import Event
from mlx_parallm.types.events import TokenEvent


def pack_events(events: Sequence[Event]) -> list[Any]:
    """Events of tokens as tuples, which are pickled in a fifth of the time; others as they are."""
    return [
        (
            one.request_id,
            one.index,
            one.token_ids,
            one.text,
            one.logprobs,
            one.finish_reason,
            one.stop_reason,
            one.version,
        )
        if type(one) is TokenEvent
        else one
        for one in events
    ]


def unpack_events(packed: Sequence[Any]) -> list[Event]:
    """The events that ``pack_events`` was given."""
    return [_token_event(*one) if type(one) is tuple else one for one in packed]


def _token_event(
    request_id: str,
    index: int,
    token_ids: tuple[int, ...],
    text: str,
    logprobs: Any,
    finish_reason: Any,
    stop_reason: int | str | None,
    version: str,
) -> TokenEvent:
    return TokenEvent(
        request_id=request_id,
        index=index,
        token_ids=token_ids,
        text=text,
        logprobs=logprobs,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        version=version,
    )
