"""Types of the parts of transformers' and mlx_lm's tokenizers that are used.

Both libraries leave parameters without types, and mlx_lm has no public name for the tokenizer that
it wraps. Other modules import classes of transformers from here: mlx_lm must be imported first,
because it turns off what transformers prints when it is imported.
"""

# The functions that load have parameters and results without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mlx_lm import tokenizer_utils
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import TokenizersBackend as TokenizersBackend


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


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """A tokenizer loaded by mlx_lm.

    Attributes:
        renderer: encodes texts, and renders conversations as mlx_lm does.
        hub: the tokenizer of transformers in it.
        renders_itself: True if mlx_lm renders conversations in Python instead of by a template.
        has_chat_template: True if it could render conversations when it was loaded.
        eos_ids: tokens that end generation.
    """

    renderer: TextRenderer
    hub: HubTokenizer
    renders_itself: bool
    has_chat_template: bool
    eos_ids: frozenset[int]


def load_with_mlx_lm(
    folder: Path,
    *,
    eos_ids: Sequence[int],
    chat_template: str | None = None,
    trust_remote_code: bool = False,
) -> LoadedTokenizer:
    """Return the tokenizer of a folder, with a template in place of its own if one is passed."""
    wrapper: Any = tokenizer_utils.load(
        folder, {"trust_remote_code": trust_remote_code}, eos_token_ids=eos_ids
    )
    if chat_template is not None:
        wrapper._tokenizer.chat_template = chat_template
        wrapper._chat_template = None
    return LoadedTokenizer(
        renderer=wrapper,
        hub=wrapper._tokenizer,
        renders_itself=wrapper._chat_template is not None,
        has_chat_template=bool(wrapper.has_chat_template),
        eos_ids=frozenset(wrapper.eos_token_ids),
    )


def load_with_transformers(folder: Path, *, trust_remote_code: bool = False) -> HubTokenizer:
    """Return the tokenizer of a folder."""
    loaded: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    return loaded


def inherits(tokenizer: object, method: str, base: type = PreTrainedTokenizerBase) -> bool:
    """True if a tokenizer's method is the one of ``base``, and not overridden by its class."""
    return getattr(type(tokenizer), method, None) is getattr(base, method)
