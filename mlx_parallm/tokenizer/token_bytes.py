"""The bytes a single token stands for."""

from __future__ import annotations

import re

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE = "\u2581"


def gpt2_byte_map() -> dict[str, int]:
    """Return the byte of each character in byte-level BPE vocabularies.

    Printable Latin-1 characters stand for themselves; the other 68 bytes, in order, are the
    characters from U+0100 on (GPT-2, Radford et al. 2019).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    escaped = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(escaped)
    }


def byte_level_bytes(token: str, byte_map: dict[str, int]) -> bytes:
    """Return a byte-level token's bytes; a token with a character outside the map is plain text."""
    try:
        return bytes([byte_map[character] for character in token])
    except KeyError:
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """Return a SentencePiece token's bytes: ``<0xE2>`` is a byte, U+2581 is a space."""
    match = _BYTE_TOKEN.fullmatch(token)
    if match is not None:
        return bytes([int(match[1], 16)])
    return token.replace(_METASPACE, " ").encode()


def is_sentencepiece_token(token: str) -> bool:
    """True if a token is written in one of SentencePiece's two special ways."""
    return _METASPACE in token or _BYTE_TOKEN.fullmatch(token) is not None
