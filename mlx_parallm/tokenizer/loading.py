"""Loads the tokenizers of decoders' folders; processes without MLX unpickle them instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from mlx_parallm.models.load_failures import load_failures
from mlx_parallm.tokenizer.decoder_tokenizer import DecoderTokenizer
from mlx_parallm.tokenizer.libraries import load_with_mlx_lm, load_with_transformers
from mlx_parallm.tokenizer.loaded import HubTokenizer
from mlx_parallm.tokenizer.tokenizer import ParallmTokenizer
from mlx_parallm.types.errors import ConfigError, ModelLoadError
from mlx_parallm.types.json_values import is_list, is_object


def load_tokenizer(
    path: Path, *, chat_template: str | None = None, trust_remote_code: bool = False
) -> ParallmTokenizer:
    """Load the tokenizer in a local folder.

    Args:
        path: a folder with tokenizer files, ``config.json`` and perhaps
            ``generation_config.json``; the end-of-sequence tokens of all three apply.
        chat_template: a Jinja template, or the path of a file with one, instead of the model's.
        trust_remote_code: run Python code that comes with the tokenizer.

    Raises:
        ConfigError: ``chat_template`` is neither a template nor a readable file.
        ModelLoadError: the folder has no tokenizer that can be loaded.
    """
    template = None if chat_template is None else _read_template(chat_template)
    with load_failures(path, "has no tokenizer that can be loaded"):
        loaded = load_with_mlx_lm(
            path,
            eos_ids=sorted(_configured_eos_ids(path)),
            chat_template=template,
            trust_remote_code=trust_remote_code,
        )
    return ParallmTokenizer(loaded)


def load_hub_tokenizer(
    path: Path, *, chat_template: str | None = None, trust_remote_code: bool = False
) -> HubTokenizer:
    """Return transformers' tokenizer of a folder; see ``load_tokenizer``."""
    template = None if chat_template is None else _read_template(chat_template)
    with load_failures(path, "has no tokenizer that can be loaded"):
        loaded = load_with_transformers(path, trust_remote_code=trust_remote_code)
    if template is not None:
        loaded.chat_template = template
    return loaded


def _read_template(chat_template: str) -> str:
    if "{" in chat_template or "\n" in chat_template:
        return chat_template
    try:
        return Path(chat_template).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"chat_template is neither a Jinja template nor a readable file: {error}"
        ) from error


def _configured_eos_ids(path: Path) -> set[int]:
    """Return the end-of-sequence tokens named by the model's own files.

    Raises:
        ModelLoadError: a file's ``eos_token_id`` is neither an id nor a list of ids.
    """
    config = _read_json(path / "config.json")
    sources = [config, config.get("text_config"), _read_json(path / "generation_config.json")]
    eos_ids: set[int] = set()
    for source in sources:
        ids = source.get("eos_token_id") if is_object(source) else None
        listed = ids if is_list(ids) else [] if ids is None else [ids]
        if not all(isinstance(token_id, int) for token_id in listed):
            raise ModelLoadError(
                f"{path}: eos_token_id {ids!r} must be a token id or a list of token ids."
            )
        eos_ids.update(listed)
    return eos_ids


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path} is not JSON: {error}") from error
    if not is_object(content):
        raise ModelLoadError(f"{path} must be a JSON object.")
    return content


def load_decoder_tokenizer(
    folder: Path,
    *,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    scores_pairs: bool = False,
    instruction: str | None = None,
) -> DecoderTokenizer:
    """Return the tokenizer in a decoder's folder; see ``DecoderTokenizer``.

    Raises:
        ConfigError: ``chat_template`` is neither a template nor a readable file.
        ModelLoadError: the folder has no tokenizer, or not one of the tokenizers library.
    """
    chat = load_tokenizer(folder, chat_template=chat_template, trust_remote_code=trust_remote_code)
    if chat.backend_json is None:
        raise ModelLoadError(f"{folder}: its tokenizer must be one of the tokenizers library.")
    # The backend is copied, because transformers' own is not thread-safe.
    backend = Tokenizer.from_str(chat.backend_json)
    return DecoderTokenizer(chat, backend, scores_pairs=scores_pairs, instruction=instruction)
