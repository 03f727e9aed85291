"""What comes back from the engine: events of one request, in order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mlx_parallm.types.errors import ParallmError
from mlx_parallm.types.record import message
from mlx_parallm.types.step import TokenLogprob
from mlx_parallm.types.weights import DEFAULT_VERSION


class FinishReason(StrEnum):
    """Why a sample ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEvent:
    """First event of a request: its prompt has been computed.

    ``prompt_logprobs`` has one entry per prompt token; the first, which follows nothing, is None.
    """

    request_id: str
    num_cached_tokens: int
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


@message
class TokenEvent:
    """New tokens of sample ``index``, with the text that became printable.

    ``text`` can lag behind ``token_ids``: half a UTF-8 character and what may become a stop string
    are held back. The last event of a sample has a ``finish_reason`` and all text that remained;
    its ``token_ids`` may be empty. ``stop_reason`` is the stop string or stop token id met, None
    for the model's own end-of-sequence. ``logprobs`` is parallel to ``token_ids`` when asked for.
    The token that ended a sample (end-of-sequence or stop token) is in ``token_ids``, not in
    ``text``. ``version`` is the label of the weights that made the tokens. ``pieces`` are
    the events that it was joined from, if it was.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    version: str = DEFAULT_VERSION
    pieces: tuple[TokenEvent, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorEvent:
    """The request ended by an error; nothing follows."""

    request_id: str
    error: ParallmError


GenerateEvent = PromptEvent | TokenEvent | ErrorEvent
