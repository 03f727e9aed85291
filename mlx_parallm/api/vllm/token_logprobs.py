"""Log-probabilities by token id, as vLLM's route from tokens to tokens writes them."""

from __future__ import annotations

from typing import Any

from mlx_parallm.generation.model import Tokenizer
from mlx_parallm.types.request import ALL_TOKENS
from mlx_parallm.types.step import TokenLogprob


class TokenEntries:
    """Writes entries that clients of every version of vLLM read.

    vLLM 0.33 names a token by ``token_id``, older versions by the text ``token_id:N``; clients
    look for the one or the other, so both are there. Ranks are those among the likeliest that were
    asked for; null for a token outside of them.
    """

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        """``tokenizer`` makes ``token`` the token's text, and adds its ``bytes``."""
        self._tokenizer = tokenizer

    def entry(self, token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        """One token."""
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
        """Return a sampled token with those that were asked for by id, in the order asked for."""
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
