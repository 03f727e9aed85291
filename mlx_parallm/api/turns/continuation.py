"""The tokens of a text that stands in the middle of another."""

from __future__ import annotations

from typing import Protocol


class EncodesText(Protocol):
    """The part of a tokenizer that this module uses."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenise a text."""
        ...


def continuation_ids(tokenizer: EncodesText, anchor: str, text: str) -> tuple[int, ...]:
    """Return the tokens of ``text`` where it stands after ``anchor``, and not at the beginning.

    Some tokenizers put a space before a text that begins. Where they join the text with what stands
    before it, it gets the tokens that it has alone.
    """
    before = tokenizer.encode(anchor, add_special_tokens=False)
    whole = tokenizer.encode(anchor + text, add_special_tokens=False)
    if whole[: len(before)] == before:
        return tuple(whole[len(before) :])
    return tuple(tokenizer.encode(text, add_special_tokens=False))
