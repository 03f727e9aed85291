"""From texts and conversations to token ids, off the event loop where that takes long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from mlx_parallm.api.reasoning import ReasoningSplitter
from mlx_parallm.api.schemas.chat import ChatRequest
from mlx_parallm.api.schemas.completions import CompletionRequest
from mlx_parallm.engine.interface import Tokenizer

# A text longer than this is tokenised on a worker thread: it would hold up every stream.
LONG_TEXT_CHARS = 8192


async def encode_chat(body: ChatRequest, tokenizer: Tokenizer) -> tuple[str, tuple[int, ...]]:
    """The rendered conversation and its tokens.

    Raises:
        InvalidRequestError: the template refuses the messages.
    """
    turns = body.turns()
    kwargs = body.template_kwargs()

    def encode() -> tuple[str, tuple[int, ...]]:
        text = tokenizer.render_chat(
            turns,
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final_message=body.continue_final_message,
            template_kwargs=kwargs,
        )
        return text, tuple(tokenizer.encode(text, add_special_tokens=False))

    return await _maybe_in_thread(encode, sum(len(turn["content"]) for turn in turns))


async def encode_prompts(
    body: CompletionRequest, tokenizer: Tokenizer
) -> list[tuple[str, tuple[int, ...]]]:
    """Every prompt as text (needed by ``echo`` only) and tokens.

    Raises:
        InvalidRequestError: there is no prompt, or an empty one.
    """
    prompts = body.prompts()

    def encode() -> list[tuple[str, tuple[int, ...]]]:
        return [_encode_prompt(prompt, body, tokenizer) for prompt in prompts]

    return await _maybe_in_thread(encode, sum(len(prompt) for prompt in prompts))


def _encode_prompt(
    prompt: str | list[int], body: CompletionRequest, tokenizer: Tokenizer
) -> tuple[str, tuple[int, ...]]:
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens)
        return prompt, tuple(ids)
    known = all(0 <= token_id < tokenizer.vocab_size for token_id in prompt)
    return tokenizer.decode(prompt) if body.echo and known else "", tuple(prompt)


def splitters(
    body: ChatRequest, tokenizer: Tokenizer, rendered: str
) -> list[ReasoningSplitter] | None:
    """One per choice where the model marks its reasoning; the template may have opened it."""
    markers = tokenizer.think_markers
    if markers is None:
        return None
    start, end = markers
    is_open = rendered.rstrip().endswith(start)
    return [ReasoningSplitter(start, end, is_open=is_open) for _ in range(body.n)]


async def _maybe_in_thread(encode: Callable[[], Any], length: int) -> Any:
    return await asyncio.to_thread(encode) if length > LONG_TEXT_CHARS else encode()
