"""An encoder's tokenizer, which puts special tokens around texts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer

from mlx_parallm.models.load_failures import load_failures
from mlx_parallm.tokenizer.cut import cut_ids, specials_around
from mlx_parallm.tokenizer.encoder_settings import has_token_types, read_backend
from mlx_parallm.tokenizer.jinja_chat import ChatTemplate, has_chat_template
from mlx_parallm.tokenizer.loaded import HubTokenizer
from mlx_parallm.tokenizer.released import ReleasedTokenizer
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_object
from mlx_parallm.types.pooling import TokenSpan
from mlx_parallm.types.token_limit import ANY_LENGTH, TokenLimit

# FILES: the second, older file fills in what the first one leaves out.
FILES = ("tokenizer_config.json", "special_tokens_map.json")
#: ``USUAL``: BERT's and RoBERTa's names, for folders with no file but ``tokenizer.json``.
USUAL = {
    "mask_token": ("[MASK]", "<mask>"),
    "pad_token": ("[PAD]", "<pad>"),
    "unk_token": ("[UNK]", "<unk>"),
}


class EncoderTokenizer:
    """The tokenizer of a pooling model. Its methods may be called from any thread."""

    def __init__(
        self,
        backend: Tokenizer,
        special: SpecialTokens | None = None,
        template: ChatTemplate | None = None,
        *,
        has_types: bool = True,
    ) -> None:
        """Take over ``backend``.

        Args:
            backend: the tokenizer; its truncation and padding are turned off.
            special: the names of its special tokens.
            template: the model's chat template; None if it has none.
            has_types: False: all tokens have one type, whatever the tokenizer says.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._released = ReleasedTokenizer(backend)
        self._template = template
        self._has_types = has_types
        self._begin, self._end = specials_around(
            backend.encode("a").ids, backend.encode("a", add_special_tokens=False).ids
        )
        self._special = special or SpecialTokens()

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def mask_token(self) -> str | None:
        """The mask token of masked LMs; None if there is none."""
        return self._special.mask

    @property
    def pad_id(self) -> int | None:
        """The padding id; None if there is none."""
        return None if self._special.pad is None else self.token_id(self._special.pad)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens, which are no part of a text."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    @property
    def begin_ids(self) -> tuple[int, ...]:
        """The special tokens before a text."""
        return self._begin

    def encode(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        limit: TokenLimit = ANY_LENGTH,
    ) -> list[tuple[int, ...]]:
        """Return the ids of each text, with the model's special tokens around them if wanted.

        Raises:
            ContextLengthError: a text has more tokens than ``limit`` allows. If its length in
                characters shows that, nothing was encoded.
        """
        return self._released.ids(texts, limit, add_special_tokens=add_special_tokens)

    @property
    def has_chat_template(self) -> bool:
        """True if ``encode_chat`` works."""
        return self._template is not None

    def probe_template(self) -> Sequence[str]:
        """Find out what the chat template takes, if there is one; return what it leaves out."""
        return () if self._template is None else self._template.probe()

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        limit: TokenLimit = ANY_LENGTH,
        **options: Any,
    ) -> tuple[int, ...]:
        """Return the ids of a conversation; ``options`` are those of ``ChatTemplate.render``.

        Raises:
            InvalidRequestError: there is no chat template, or it refuses (param "messages").
            ContextLengthError: as in ``encode``.
        """
        if self._template is None:
            raise InvalidRequestError(
                "This model has no chat template: send texts instead of messages.",
                param="messages",
            )
        text = self._template.render(messages, **options)
        (ids,) = self.encode([text], add_special_tokens=False, limit=limit)
        return ids

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, limit: TokenLimit = ANY_LENGTH
    ) -> list[tuple[tuple[int, ...], int | None]]:
        """Return, for each pair, the ids of both texts and the index where the second begins.

        Special tokens are included. The index is None if the tokenizer gives all tokens one type.

        Raises:
            ContextLengthError: as in ``encode``.
        """
        encoded: list[tuple[tuple[int, ...], int | None]] = []
        fitting = self._fitting(pairs, limit)
        for encoding in self._released.encodings(fitting, add_special_tokens=True):
            limit.check(len(encoding), len(encoded))
            types = encoding.type_ids if self._has_types else ()
            encoded.append((tuple(encoding.ids), types.index(1) if 1 in types else None))
        return encoded

    def _fitting(
        self, pairs: Sequence[tuple[str, str]], limit: TokenLimit
    ) -> list[tuple[str, str]]:
        """Return the pairs, their texts truncated to the part that ``limit`` keeps."""
        fit = self._released.fitting
        return [
            (fit(first, limit, place), fit(second, limit, place))
            for place, (first, second) in enumerate(pairs)
        ]

    def spans(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        limit: TokenLimit = ANY_LENGTH,
    ) -> list[list[TokenSpan]]:
        """Return the tokens of each text and their places in it, special ones if wanted.

        A token continues a word by the rule of transformers' token classification: by the
        vocabulary's continuation prefix, or by the spaces of the text if there is none.

        Raises:
            ContextLengthError: as in ``encode``.
        """
        prefix = getattr(self._backend.model, "continuing_subword_prefix", None)
        unknown = self._special.unk
        texts = [self._released.fitting(text, limit, i) for i, text in enumerate(texts)]
        encodings = self._released.encodings(texts, add_special_tokens=add_special_tokens)
        spans: list[list[TokenSpan]] = []
        for text, encoding in zip(texts, encodings, strict=True):
            limit.check(len(encoding), len(spans))
            rows = self._rows(encoding)
            spans.append([_span(text, bool(prefix), unknown, *row) for row in rows])
        return spans

    def _rows(self, encoding: Encoding) -> Iterator[tuple[int, str, tuple[int, int], int]]:
        """Yield (id, token, (start, end), is special) of each token.

        It reads token by token, because listing all tokens of a long text holds the GIL.
        """
        masks = encoding.special_tokens_mask
        for place, (token_id, mask) in enumerate(zip(encoding.ids, masks, strict=True)):
            token = self._backend.id_to_token(token_id) or ""
            yield token_id, token, encoding.token_to_chars(place) or (0, 0), mask

    def join(self, tokens: Sequence[str]) -> str:
        """Return the text of tokens that are given as in the vocabulary."""
        decoder = self._backend.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(list(tokens))

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its text in the vocabulary; None if it is not one token."""
        return self._backend.token_to_id(token)

    def token_string(self, token_id: int) -> str:
        """Return a token as the vocabulary writes it, such as "##ing"."""
        return self._backend.id_to_token(token_id) or ""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ``token_ids``."""
        return self._released.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def cut(
        self, token_ids: tuple[int, ...], length: int, *, from_left: bool = False
    ) -> tuple[int, ...]:
        """Return an input cut to ``length`` tokens; the special ones at its ends stay.

        ``from_left`` keeps the last tokens instead of the first.
        """
        return cut_ids(token_ids, length, from_left=from_left, begin=self._begin, end=self._end)


def _span(
    text: str,
    has_prefix: bool,
    unknown: str | None,
    token_id: int,
    token: str,
    offsets: tuple[int, int],
    special: int,
) -> TokenSpan:
    start, end = offsets
    if has_prefix:
        continues = len(token) != end - start
    else:
        continues = start > 0 and " " not in text[start - 1 : start + 1]
    is_unknown = token == unknown
    return TokenSpan(
        token_id=token_id,
        token=text[start:end] if is_unknown else token,
        start=start,
        end=end,
        is_special=bool(special),
        continues=continues and not is_unknown,
    )


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


def load_encoder_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> EncoderTokenizer:
    """Return the tokenizer of a folder, from ``tokenizer.json`` or converted by transformers.

    Raises:
        ModelLoadError: the folder has none.
    """
    with load_failures(folder, "has no tokenizer that can be loaded"):
        if (folder / "tokenizer.json").exists():
            backend = read_backend(folder)
            template = None
            if has_chat_template(folder):
                _, template = _by_transformers(folder, trust_remote_code)
        else:
            loaded, template = _by_transformers(folder, trust_remote_code)
            backend = loaded.backend_tokenizer
            template = template if loaded.chat_template else None
        special = read_special_tokens(folder, backend)
        return EncoderTokenizer(backend, special, template, has_types=has_token_types(folder))


def _by_transformers(folder: Path, trust_remote_code: bool) -> tuple[HubTokenizer, ChatTemplate]:
    """Return a folder's tokenizer, and what renders its chats."""
    # Few encoders need it, so processes without MLX import it for those alone.
    from mlx_parallm.tokenizer.libraries import (  # noqa: PLC0415
        chat_of,
        load_with_transformers,
    )

    loaded = load_with_transformers(folder, trust_remote_code=trust_remote_code)
    return loaded, ChatTemplate(loaded, chat_of(loaded, {}))
