"""Which tokens of a folder's tokenizer stand for a masked word, padding and unknown text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

# The older file has what the newer one leaves out.
FILES = ("tokenizer_config.json", "special_tokens_map.json")
#: BERT's and RoBERTa's names, for folders that have a tokenizer.json alone.
USUAL = {
    "mask_token": ("[MASK]", "<mask>"),
    "pad_token": ("[PAD]", "<pad>"),
    "unk_token": ("[UNK]", "<unk>"),
}


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Tokens by their text in the vocabulary; None where there is none."""

    mask: str | None = None
    pad: str | None = None
    unk: str | None = None


def read_special_tokens(folder: Path, backend: Tokenizer) -> SpecialTokens:
    """What the files of a folder name, or the usual names where the vocabulary has them."""
    named: dict[str, Any] = {}
    for file in reversed(FILES):
        named |= _read(folder / file)
    mask, pad, unk = (_token(named, key, backend) for key in USUAL)
    return SpecialTokens(mask, pad, unk)


def _token(named: dict[str, Any], key: str, backend: Tokenizer) -> str | None:
    given = named.get(key)
    if isinstance(given, dict):
        # An added token with its flags.
        given = given.get("content")
    usual = [given] if isinstance(given, str) else USUAL[key]
    return next((token for token in usual if backend.token_to_id(token) is not None), None)


def _read(file: Path) -> dict[str, Any]:
    """An object of JSON; empty where there is none.

    Raises:
        ValueError: it is not JSON.
    """
    if not file.exists():
        return {}
    found = json.loads(file.read_text(encoding="utf-8"))
    return {key: one for key, one in found.items() if one is not None}
