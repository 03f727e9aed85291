"""A tokenizer of transformers without transformers: the tokenizers library, and Jinja."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer
from typing_extensions import override

from mlx_parallm.tokenizer.jinja_chat import JinjaChat
from mlx_parallm.tokenizer.loaded import ChatRenderer, HubTokenizer, TextRenderer


class PlainTokenizer(HubTokenizer, TextRenderer, ChatRenderer):
    """A tokenizer whose class adds nothing to its backend. Implements ``HubTokenizer``.

    It can be unpickled in a process without transformers and MLX. Its methods may be called from
    any thread.
    """

    def __init__(self, backend: Tokenizer, chat: JinjaChat) -> None:
        """``backend`` neither truncates nor pads."""
        self._backend = backend
        self._chat = chat

    @property
    def chat_template(self) -> str | Mapping[str, str] | None:
        """The template, or several by name; None if there is none."""
        return self._chat.templates

    @property
    @override
    def backend_tokenizer(self) -> Tokenizer:
        return self._backend

    @property
    @override
    def bos_token(self) -> str | None:
        return self._chat.special_tokens.get("bos_token")

    @property
    @override
    def all_special_ids(self) -> list[int]:
        added = self._backend.get_added_tokens_decoder()
        return [token_id for token_id, token in added.items() if token.special]

    @override
    def get_vocab(self) -> dict[str, int]:
        return self._backend.get_vocab(with_added_tokens=True)

    @override
    def encode(
        self, text: str, /, *, add_special_tokens: bool = True, verbose: bool = True
    ) -> Sequence[int]:
        del verbose
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    @override
    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str:
        """Spaces stay as they are."""
        assert not clean_up_tokenization_spaces, "nobody wants that"
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    @override
    def convert_ids_to_tokens(self, ids: int, /) -> str | None:
        return self._backend.id_to_token(ids)

    @override
    def apply_chat_template(
        self, conversation: list[dict[str, Any]], /, *, tokenize: bool, **options: Any
    ) -> str:
        assert not tokenize, "texts are encoded by the caller"
        return self._chat.render(conversation, **options)
