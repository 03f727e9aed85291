"""The mask, padding and unknown tokens of a folder's tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from mlx_parallm.types.json_values import is_object

# FILES: the second, older file fills in what the first one leaves out.
FILES = ("tokenizer_config.json", "special_tokens_map.json")
#: ``USUAL``: BERT's and RoBERTa's names, for folders with no file but ``tokenizer.json``.
USUAL = {
    "mask_token": ("[MASK]", "<mask>"),
    "pad_token": ("[PAD]", "<pad>"),
    "unk_token": ("[UNK]", "<unk>"),
}


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Special tokens by their text in the vocabulary; None if there is none."""

    mask: str | None = None
    pad: str | None = None
    unk: str | None = None


def read_special_tokens(folder: Path, backend: Tokenizer) -> SpecialTokens:
    """Return the tokens that a folder's files name, else the usual names in its vocabulary."""
    named: dict[str, Any] = {}
    for file in reversed(FILES):
        named |= _read(folder / file)
    mask, pad, unk = (_token(named, key, backend) for key in USUAL)
    return SpecialTokens(mask, pad, unk)


def _token(named: dict[str, Any], key: str, backend: Tokenizer) -> str | None:
    token = named.get(key)
    if is_object(token):
        # The file has an added token with its flags.
        token = token.get("content")
    candidates = [token] if isinstance(token, str) else USUAL[key]
    return next((name for name in candidates if backend.token_to_id(name) is not None), None)


def _read(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file, without nulls; empty if there is no file or object.

    Raises:
        ValueError: it is not JSON.
    """
    if not file.exists():
        return {}
    named = json.loads(file.read_text(encoding="utf-8"))
    return {key: token for key, token in named.items() if token is not None}
