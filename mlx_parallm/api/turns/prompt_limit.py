"""``truncate_prompt_tokens`` of routes that generate, as vLLM has it."""

from __future__ import annotations

from typing import Literal

from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.request import TokenLimit

FIELD = "truncate_prompt_tokens"


def prompt_limit(
    truncate: int | None,
    side: Literal["left", "right"],
    *,
    max_tokens: int | None,
    max_model_len: int,
) -> TokenLimit | None:
    """Return what a prompt is cut to; None where it is not to be cut.

    Args:
        truncate: so many tokens stay; -1: as many as leave room for ``max_tokens``.
        side: the end of the prompt at which it is cut; "left" keeps its last tokens.
        max_tokens: most tokens to generate; None: one at least.
        max_model_len: prompt and output together.

    Raises:
        InvalidRequestError: the tokens that are to stay leave no room for those to generate.
    """
    if truncate is None:
        return None
    room = max_model_len - (1 if max_tokens is None else max_tokens)
    if room < 1 or not (truncate == -1 or 1 <= truncate <= room):
        raise InvalidRequestError(
            f"{FIELD} is -1 or from 1 to {room}, which is what max_tokens leave of the context."
            if room >= 1
            else f"max_tokens leave no room for a prompt in a context of {max_model_len} tokens.",
            param=FIELD if room >= 1 else "max_tokens",
        )
    most = room if truncate == -1 else truncate
    return TokenLimit(most=most, cuts=True, from_left=side == "left")
