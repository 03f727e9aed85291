"""Log-probabilities by token id, in the form of vLLM's token-in, token-out route.

vLLM 0.33 names a token by ``token_id``, older versions by the text ``token_id:N``; entries have
both, so that clients of all versions can read them.
"""

from __future__ import annotations

from typing import Any

from mlx_parallm.api.vllm.schema import TokenSamplingParams
from mlx_parallm.generation.model import Tokenizer
from mlx_parallm.types.request import ALL_TOKENS
from mlx_parallm.types.step import TokenLogprob


def sampled_entry(
    sampled: TokenLogprob, params: TokenSamplingParams, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Return a sampled token with its alternatives.

    These are the tokens that the request names, in its order and without ranks; or the sampled
    token and the likeliest ones by rank, as many as the request wants.

    Args:
        sampled: the token.
        params: what the request wants to know.
        tokenizer: gives the tokens' texts and bytes; None: they are left out.
    """
    is_named = bool(params.logprob_token_ids)
    ids = () if is_named else (token_id for token_id, _ in sampled.top)
    ranks = {token_id: rank for rank, token_id in enumerate(ids, start=1)}
    rank = ranks.get(sampled.token_id, sampled.rank)
    own = _entry(sampled.token_id, sampled.logprob, rank, tokenizer)
    shown = [
        _entry(token_id, value, ranks.get(token_id), tokenizer)
        for token_id, value in sampled.top
        if is_named or token_id != sampled.token_id
    ]
    if not is_named:
        count = params.logprobs or 0
        shown = [own.copy(), *shown][: None if count == ALL_TOKENS else max(count, 1)]
    return own | {"top_logprobs": shown}


def _entry(
    token_id: int, logprob: float, rank: int | None, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    entry: dict[str, Any] = {"token": f"token_id:{token_id}"}
    if tokenizer is not None:
        entry["token"] = tokenizer.token_string(token_id)
        entry["bytes"] = list(tokenizer.token_bytes(token_id))
    return entry | {"token_id": token_id, "logprob": logprob, "rank": rank}
