"""The parts that all answers in OpenAI's shape share: head and usage."""

from __future__ import annotations

import hashlib
import json
import time
from typing import Any

from mlx_parallm import __version__
from mlx_parallm.api.turns.fields import StreamOptions
from mlx_parallm.api.turns.prelude import Admitted
from mlx_parallm.api.turns.samples import Usage
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.serving.interface import RequestClient

DIGEST_CHARS = 12


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


def system_fingerprint(engine: RequestClient, model: GenerationModel) -> str:
    """Return a short digest of a model's weights as they are now, and of how it is served.

    It stays the same over restarts. It changes with an update of the weights or of the adapter, or
    their label, with the version of this program and with settings that change results. A request
    that runs during an update reports the version it started with; ``weight_versions`` say more.
    """
    info = model.info
    base = engine.control.version(model.parent or model.names[0])
    digests = (
        adapter.digest for adapter in engine.control.adapters() if adapter.name == model.adapter
    )
    facts = [
        __version__,
        model.revision,
        [base.content, base.label],
        None if model.adapter is None else next(digests, ""),
        model.tokenizer.chat_template,
        dict(model.chat_template_kwargs),
        engine.config.logprobs_mode,
        [info.path, info.attention_backend, info.dtype, info.kv_cache_dtype, info.max_model_len],
    ]
    text = json.dumps(facts, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"fp_{digest[:DIGEST_CHARS]}"
