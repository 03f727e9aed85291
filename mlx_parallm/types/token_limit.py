"""Limits on the tokens of a text, so that no more are encoded than are useful."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_parallm.types.errors import ContextLengthError


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimit:
    """Number of useful tokens of a text; known before the text is encoded.

    Attributes:
        most: the largest number of tokens; None: no limit.
        slack: further tokens that are encoded before a text is refused.
        cuts: True: a longer text is truncated; False: it is refused.
        from_left: with ``cuts``: the beginning is dropped, not the end.
        name: the request field of several texts; None: there is one prompt.
        first: the number of the first of several texts, in messages.
        places: what messages call each of several texts; by default the field and its number.
    """

    most: int | None
    slack: int = 0
    cuts: bool = False
    from_left: bool = False
    name: str | None = None
    first: int = 0
    places: Sequence[str] = ()

    def place(self, number: int) -> str:
        """Return what messages call a text."""
        index = self.first + number
        return self.places[index] if self.places else f"{self.name} {index}"

    def check(self, num_tokens: int, place: int = 0) -> None:
        """Raise ContextLengthError if text ``place`` has too many tokens and may not be cut."""
        if self.most is not None and not self.cuts and num_tokens > self.most + self.slack:
            raise self.refusal(str(num_tokens), place)

    def refusal(self, count: str, place: int = 0) -> ContextLengthError:
        """Return the error for text ``place``, which has ``count`` tokens."""
        most = self.most or 0
        if self.name is None:
            detail = f"However, your prompt has {count} tokens. Please shorten it."
            return ContextLengthError(most, detail, prompt_tokens=count)
        detail = f"{self.place(place)} has {count}. Shorten it, or set truncate_prompt_tokens."
        return ContextLengthError(most, detail, param=self.name)


#: ``ANY_LENGTH`` is the limit of texts whose tokens are only counted.
ANY_LENGTH = TokenLimit(most=None)
