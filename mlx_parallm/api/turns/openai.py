"""The parts that all answers in OpenAI's shape share: head and usage."""

from __future__ import annotations

import time
from typing import Any

from mlx_parallm.api.turns.fields import StreamOptions
from mlx_parallm.api.turns.fingerprint import system_fingerprint
from mlx_parallm.api.turns.prelude import Admitted
from mlx_parallm.api.turns.samples import Usage


def answer_head(admitted: Admitted, answer_id: str, kind: str) -> dict[str, Any]:
    """Return the keys that an answer begins with, and that each of its chunks repeats.

    Args:
        admitted: the request.
        answer_id: of the answer.
        kind: its ``object``.
    """
    return {
        "id": answer_id,
        "object": kind,
        "created": int(time.time()),
        "model": admitted.name,
        "system_fingerprint": system_fingerprint(admitted.prelude.engine, admitted.model),
    }


def usage_body(usage: Usage) -> dict[str, Any]:
    """Return token counts as OpenAI writes them."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": usage.prompt_details(),
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def chunk_usage(usage: Usage, options: StreamOptions | None) -> dict[str, Any]:
    """Return the ``usage`` key of a chunk with choices: the counts so far, null, or no key."""
    if options is not None and options.tells_usage_so_far:
        return {"usage": usage_body(usage)}
    return {"usage": None} if options is not None and options.include_usage else {}


def closing_chunks(
    head: dict[str, Any], usage: Usage, options: StreamOptions | None
) -> list[dict[str, Any]]:
    """Return what follows the last choice of a stream: the usage, if the client wants it."""
    if options is None or not options.include_usage:
        return []
    return [head | {"choices": [], "usage": usage_body(usage)}]
