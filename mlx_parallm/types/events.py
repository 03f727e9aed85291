"""Events of one request, which the engine sends back in order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mlx_parallm.types.errors import ParallmError
from mlx_parallm.types.record import message
from mlx_parallm.types.request import DEFAULT_VERSION
from mlx_parallm.types.step import TokenLogprob
from mlx_parallm.types.work import Ends


class FinishReason(StrEnum):
    """Why a sample ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEvent:
    """The prompt has been computed; this is a request's first event.

    ``num_cached_tokens`` were found in the prefix cache, and ``num_newly_cached_tokens`` were put
    there; the others were computed and fill no block. ``prompt_logprobs`` has one entry per prompt
    token; the first token's is None, because nothing precedes it.
    """

    request_id: str
    num_cached_tokens: int
    num_newly_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    @property
    def num_tokens(self) -> int:
        """Return the number of generated tokens in it: none."""
        return 0

    @property
    def ends(self) -> Ends:
        """Return what ends with it."""
        return Ends.NOTHING


@message
class TokenEvent:
    """New tokens of sample ``index``, with the text that became printable.

    ``text`` can lag behind ``token_ids``: an incomplete UTF-8 character and a possible beginning
    of a stop string are held back. The last event of a sample has a ``finish_reason`` and all the
    remaining text; its ``token_ids`` may be empty. ``stop_reason`` is the stop string or stop token
    id that was met, None for the model's own end-of-sequence. ``logprobs`` is parallel to
    ``token_ids`` if the request wants log-probabilities, else empty. The token that ended a sample
    (end-of-sequence or stop token) is in ``token_ids``, but not in ``text``. ``version`` is the
    label of the weights that made the tokens. ``pieces`` are the events that were joined into this
    one; empty if none were.
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

    @property
    def num_tokens(self) -> int:
        """Return the number of generated tokens in it."""
        return len(self.token_ids)

    @property
    def ends(self) -> Ends:
        """Return what ends with it."""
        return Ends.NOTHING if self.finish_reason is None else Ends.SAMPLE


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorEvent:
    """The request ended with an error; no event follows."""

    request_id: str
    error: ParallmError

    @property
    def num_tokens(self) -> int:
        """Return the number of generated tokens in it: none."""
        return 0

    @property
    def ends(self) -> Ends:
        """Return what ends with it."""
        return Ends.REQUEST


GenerateEvent = PromptEvent | TokenEvent | ErrorEvent
