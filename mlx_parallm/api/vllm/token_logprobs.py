"""Log-probabilities by token id, in the form of vLLM's token-in, token-out route."""

from __future__ import annotations

from typing import Any

from mlx_parallm.generation.model import Tokenizer
from mlx_parallm.types.request import ALL_TOKENS
from mlx_parallm.types.step import TokenLogprob


class TokenEntries:
    """Writes entries that clients of all versions of vLLM can read.

    vLLM 0.33 names a token by ``token_id``, older versions by the text ``token_id:N``; entries have
    both. Ranks count among the requested alternatives; a token outside of them has null.
    """

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        """With ``tokenizer``, ``token`` is the token's text, and ``bytes`` are added."""
        self._tokenizer = tokenizer

    def entry(self, token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        """Return the entry of a token."""
        named = self._names(token_id)
        return named | {"token_id": token_id, "logprob": logprob, "rank": rank}

    def with_top(self, entry: TokenLogprob, count: int) -> dict[str, Any]:
        """Return a sampled token, first among ``count`` alternatives (-1: all), then by rank."""
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(entry.top, start=1)}
        own = self.entry(entry.token_id, entry.logprob, ranks.get(entry.token_id, entry.rank))
        others = [
            self.entry(token_id, value, ranks[token_id])
            for token_id, value in entry.top
            if token_id != entry.token_id
        ]
        shown = [own.copy(), *others]
        return own | {"top_logprobs": shown if count == ALL_TOKENS else shown[: max(count, 1)]}

    def with_named(self, entry: TokenLogprob) -> dict[str, Any]:
        """Return a sampled token with the tokens that the request names, in their order."""
        named = [self.entry(token_id, value, None) for token_id, value in entry.top]
        own = self.entry(entry.token_id, entry.logprob, entry.rank)
        return own | {"top_logprobs": named}

    def _names(self, token_id: int) -> dict[str, Any]:
        if self._tokenizer is None:
            return {"token": f"token_id:{token_id}"}
        return {
            "token": self._tokenizer.token_string(token_id),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }
