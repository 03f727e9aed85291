"""Log-probabilities in OpenAI's and vLLM's shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from mlx_parallm.generation.model import Tokenizer
from mlx_parallm.types.request import ALL_TOKENS
from mlx_parallm.types.step import TokenLogprob


class TokenNames:
    """Names of tokens in answers: their text, or ``token_id:N`` when asked for."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        """Return the token's text or id."""
        return f"token_id:{token_id}" if self._as_ids else self.text(token_id)

    def text(self, token_id: int) -> str:
        """Return the token's text, however tokens are written."""
        return self._tokenizer.token_string(token_id)

    def entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        """One token of a chat's log-probabilities."""
        entry = {
            "token": self.name(token_id),
            "logprob": logprob,
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }
        return entry | {"special": True} if self.is_special(token_id) else entry

    def is_special(self, token_id: int) -> bool:
        """Return True if the token is no text, such as the end of a turn."""
        return self._tokenizer.vocabulary_string(token_id) in self._tokenizer.special_tokens

    def with_top(self, entry: TokenLogprob) -> dict[str, Any]:
        """Return one token with the likeliest others."""
        top = [self.entry(token_id, value) for token_id, value in entry.top]
        return self.entry(entry.token_id, entry.logprob) | {"top_logprobs": top}

    def bytes(self, token_id: int) -> bytes:
        """Return what the token contributes to the text."""
        return self._tokenizer.token_bytes(token_id)


def chat_logprobs(entries: Iterable[TokenLogprob], names: TokenNames) -> dict[str, Any]:
    """``choice.logprobs`` of a chat completion."""
    return {"content": [names.with_top(entry) for entry in entries], "refusal": None}


class TextTokens:
    """Finds the tokens of a text among those that carry markers and other texts."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._tokens: list[tuple[bytes, TokenLogprob | None]] = []

    def add(self, entries: Iterable[TokenLogprob]) -> None:
        """Tokens whose text comes now or later."""
        self._tokens += [(self._names.bytes(entry.token_id), entry) for entry in entries]

    def take(self, text: str) -> list[dict[str, Any]]:
        """Return the tokens that the next text consists of; those before it are dropped.

        All that are there, where the text is not spelled by them: half characters, for one.
        """
        wanted = text.encode()
        begin = b"".join(spelled for spelled, _ in self._tokens).find(wanted)
        if begin < 0:
            begin, wanted = 0, b"".join(spelled for spelled, _ in self._tokens)
        end, place = begin + len(wanted), 0
        taken: list[dict[str, Any]] = []
        while self._tokens and place < end:
            spelled, entry = self._tokens.pop(0)
            place += len(spelled)
            if place > begin and entry is not None:
                taken.append(self._names.with_top(entry))
            if place > end:
                # The rest of the token belongs to the next text; a token is returned once.
                self._tokens.insert(0, (spelled[end - place :], None))
        return taken


class CompletionLogprobs:
    """``choice.logprobs`` of a completion, whose offsets count the characters so far."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._offset = 0

    def take(
        self, entries: Sequence[tuple[int, TokenLogprob | None]], *, text: str | None = None
    ) -> dict[str, Any]:
        """Return the next tokens.

        Args:
            entries: each token with its log-probability; None for a prompt's first token.
            text: what the first tokens of all became. A special token that it lacks, as the one
                that begins a prompt, takes no characters. None: all tokens are text.
        """
        result: dict[str, Any] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
        }  # fmt: skip
        for token_id, entry in entries:
            name = self._names.name(token_id)
            result["tokens"].append(name)
            result["text_offset"].append(self._offset)
            if text is None or not self._is_absent(token_id, text):
                self._offset += len(name)
            if entry is None:
                result["token_logprobs"].append(None)
                result["top_logprobs"].append(None)
                continue
            # As vLLM: the token itself, then the others by rank. Its value stands where another
            # token has the same text.
            top = {self._names.name(i): value for i, value in entry.top}
            result["token_logprobs"].append(entry.logprob)
            result["top_logprobs"].append({name: entry.logprob} | top | {name: entry.logprob})
        return result

    def _is_absent(self, token_id: int, text: str) -> bool:
        """Return True for a special token that does not stand at this place of a text."""
        names = self._names
        return names.is_special(token_id) and not text.startswith(
            names.text(token_id), self._offset
        )


def most_asked(counts: Iterable[int | None]) -> int | None:
    """Return the count that serves all of them; None where none is asked for."""
    wanted = [count for count in counts if count is not None]
    return ALL_TOKENS if ALL_TOKENS in wanted else max(wanted, default=None)


def with_top(entries: Iterable[TokenLogprob | None], count: int) -> tuple[TokenLogprob | None, ...]:
    """Return the entries with at most ``count`` alternatives each; -1 leaves all."""
    if count == ALL_TOKENS:
        return tuple(entries)
    return tuple(
        entry if entry is None or len(entry.top) <= count else replace(entry, top=entry.top[:count])
        for entry in entries
    )


def prompt_logprobs(
    entries: Sequence[TokenLogprob | None], names: TokenNames
) -> list[dict[str, Any] | None]:
    """VLLM's shape: by token id, the prompt's own token first; None for the first position.

    The likeliest are ranked by their order, so that equal ones have different ranks.
    """
    result: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            result.append(None)
            continue
        pairs = [(entry.token_id, entry.logprob), *entry.top]
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(entry.top, start=1)}
        result.append(
            {
                str(token_id): {
                    "logprob": value,
                    "rank": ranks.get(token_id, entry.rank),
                    "decoded_token": names.text(token_id),
                }
                for token_id, value in pairs
            }
        )
    return result
