"""Types of the parts of transformers' and mlx_lm's tokenizers that are used.

Both libraries leave parameters without types. This module imports neither: tokenizers are unpickled
in processes that have neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers import Tokenizer


class ChatRenderer(Protocol):
    """A renderer of conversations."""

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], /, *, tokenize: bool, **options: Any
    ) -> Any:
        """Return the text of a conversation if ``tokenize`` is False."""
        ...


class TextRenderer(ChatRenderer, Protocol):
    """A renderer of conversations that encodes texts too."""

    def encode(
        self, text: str, /, *, add_special_tokens: bool = True, verbose: bool = True
    ) -> Sequence[int]:
        """Return the tokens of a text."""
        ...


class HubTokenizer(ChatRenderer, Protocol):
    """A tokenizer of transformers, a ``PreTrainedTokenizerBase``."""

    chat_template: Any

    @property
    def backend_tokenizer(self) -> Any:
        """The tokenizer of the tokenizers library in it; an AttributeError if there is none."""
        ...

    @property
    def bos_token(self) -> str | None:
        """The token that begins a text, as the vocabulary writes it; None if there is none."""
        ...

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of the special tokens."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """Return the id of every token."""
        ...

    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str | list[str]:
        """Return the text of tokens."""
        ...

    def convert_ids_to_tokens(self, ids: int, /) -> Any:
        """Return a token as the vocabulary writes it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTokenizer:
    """A tokenizer loaded by mlx_lm.

    Attributes:
        class_name: the name of transformers' class.
        library: what encodes.
        renderer: encodes texts, and renders conversations if nothing else does, as mlx_lm does.
        chat: renders conversations, from any thread; None: the class has code of its own for it.
        hub: the tokenizer of transformers in it.
        encoder: the Rust tokenizer if the Python class adds nothing to its encoding, else None.
        decoder: likewise for its decoding.
        has_chat_template: True if it could render conversations when it was loaded.
        eos_ids: tokens that end generation.
        source: the tokenizer of what an encoder-decoder reads, if it is not that of what it writes.
    """

    class_name: str
    library: str
    renderer: TextRenderer
    chat: ChatRenderer | None
    hub: HubTokenizer
    encoder: Tokenizer | None
    decoder: Tokenizer | None
    has_chat_template: bool
    eos_ids: frozenset[int]
    source: LoadedTokenizer | None = None
