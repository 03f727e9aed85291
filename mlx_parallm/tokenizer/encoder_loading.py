"""Loads the tokenizers of encoders' folders."""

from __future__ import annotations

from pathlib import Path

from mlx_parallm.models.load_failures import load_failures
from mlx_parallm.tokenizer.chat_template import ChatTemplate, has_chat_template
from mlx_parallm.tokenizer.encoder_settings import has_token_types, read_backend
from mlx_parallm.tokenizer.encoder_tokenizer import EncoderTokenizer
from mlx_parallm.tokenizer.loaded import HubTokenizer
from mlx_parallm.tokenizer.special_tokens import read_special_tokens


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
        load_with_transformers,
        plain_of,
        renders_as_usual,
    )

    loaded = load_with_transformers(folder, trust_remote_code=trust_remote_code)
    renderer = plain_of(loaded, {}) or loaded
    return loaded, ChatTemplate(renderer, is_shared=renders_as_usual(loaded))
