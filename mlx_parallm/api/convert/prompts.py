"""From texts to token ids, off the event loop where that takes long."""

from __future__ import annotations

from mlx_parallm.api.convert.infill import infill_ids
from mlx_parallm.api.offload import maybe_in_thread
from mlx_parallm.api.schemas.completions import CompletionRequest
from mlx_parallm.engine.interface import Tokenizer
from mlx_parallm.errors import InvalidRequestError


async def encode_prompts(
    body: CompletionRequest, tokenizer: Tokenizer
) -> list[tuple[str, tuple[int, ...]]]:
    """Every prompt as text (needed by ``echo`` only) and tokens.

    With a suffix the tokens are those around a gap, and the text is what stands before it.

    Raises:
        InvalidRequestError: there is no prompt, or an empty one; there is a suffix, and a prompt is
            no text or the model cannot fill in.
    """
    prompts = body.prompts()

    def encode() -> list[tuple[str, tuple[int, ...]]]:
        return [_encode_prompt(prompt, body, tokenizer) for prompt in prompts]

    suffixes = len(prompts) * len(body.suffix or "")
    return await maybe_in_thread(encode, sum(len(prompt) for prompt in prompts) + suffixes)


def _encode_prompt(
    prompt: str | list[int], body: CompletionRequest, tokenizer: Tokenizer
) -> tuple[str, tuple[int, ...]]:
    if body.suffix:
        if not isinstance(prompt, str):
            raise InvalidRequestError("With a suffix, prompts must be texts.", param="prompt")
        special = body.add_special_tokens
        return prompt, infill_ids(prompt, body.suffix, tokenizer, add_special_tokens=special)
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens)
        return prompt, tuple(ids)
    known = all(0 <= token_id < tokenizer.vocab_size for token_id in prompt)
    return tokenizer.decode(prompt) if body.echo and known else "", tuple(prompt)
