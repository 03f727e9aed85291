"""An encoder's tokenizer: texts to ids with the special tokens around them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from mlx_parallm.errors import ModelLoadError


class EncoderTokenizer:
    """Of the tokenizers library, whose methods may be called from any thread."""

    def __init__(self, backend: Tokenizer) -> None:
        """``backend`` must neither cut nor pad."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend

    @property
    def vocab_size(self) -> int:
        """Token ids, added tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """The ids of each text, special tokens included."""
        found = self._backend.encode_batch_fast(list(texts), add_special_tokens=True)
        return [tuple(one.ids) for one in found]

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]]
    ) -> list[tuple[tuple[int, ...], int | None]]:
        """The ids of two texts in one input, special tokens included, and where the second begins.

        The latter is None where the tokenizer gives all tokens one type.
        """
        found = self._backend.encode_batch(list(pairs), add_special_tokens=True)
        return [
            (tuple(one.ids), one.type_ids.index(1) if 1 in one.type_ids else None) for one in found
        ]

    def token_id(self, token: str) -> int | None:
        """The id of a token by its text in the vocabulary; None if it is not one token."""
        return self._backend.token_to_id(token)

    def token_string(self, token_id: int) -> str:
        """A token's text in the vocabulary, with the marks that it has there."""
        return self._backend.id_to_token(token_id) or ""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, special ones included."""
        return self._backend.decode(list(token_ids), skip_special_tokens=False)

    def cut(self, token_ids: tuple[int, ...], length: int) -> tuple[int, ...]:
        """An input of at most so many tokens, the special ones at its end kept."""
        if len(token_ids) <= length:
            return token_ids
        ends = len(self._backend.encode("", add_special_tokens=True).ids) // 2
        kept = min(ends, length - 1)
        return (*token_ids[: length - kept], *token_ids[len(token_ids) - kept :])


def load_encoder_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> EncoderTokenizer:
    """The tokenizer of a model's folder, from ``tokenizer.json`` or what transformers makes one of.

    Raises:
        ModelLoadError: there is none.
    """
    try:
        if (folder / "tokenizer.json").exists():
            return EncoderTokenizer(Tokenizer.from_file(str(folder / "tokenizer.json")))
        loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        return EncoderTokenizer(loaded.backend_tokenizer)
    except Exception as cause:
        # The tokenizers library raises Exception itself.
        raise ModelLoadError(f"{folder}: its tokenizer could not be loaded: {cause}") from cause
