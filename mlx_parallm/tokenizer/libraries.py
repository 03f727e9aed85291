"""Loads tokenizers by mlx_lm and transformers, and takes them out of these libraries if it can.

mlx_lm must be imported first, because it turns off what transformers prints when it is imported.
mlx_lm has no public name for the tokenizer that it wraps.
"""

# The functions that load have parameters and results without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_lm import tokenizer_utils
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from mlx_parallm.tokenizer.jinja_chat import JinjaChat, PlainTokenizer, processor_template
from mlx_parallm.tokenizer.loaded import HubTokenizer, LoadedTokenizer
from mlx_parallm.tokenizer.seq2seq.convert import piece_sides
from mlx_parallm.tokenizer.seq2seq.pieces import PieceTokenizer


def load_with_mlx_lm(
    folder: Path,
    *,
    eos_ids: Sequence[int],
    chat_template: str | None = None,
    trust_remote_code: bool = False,
) -> LoadedTokenizer:
    """Return the tokenizer of a folder, with a template in place of its own if one is passed."""
    with _without_advice():
        wrapper: Any = tokenizer_utils.load(
            folder, {"trust_remote_code": trust_remote_code}, eos_token_ids=eos_ids
        )
    hub = wrapper._tokenizer
    if chat_template is not None:
        hub.chat_template = chat_template
        wrapper._chat_template = None
    elif not wrapper.has_chat_template:
        hub.chat_template = processor_template(folder)
    _forget_truncation(hub)
    eos = frozenset[int](wrapper.eos_token_ids)
    sides = piece_sides(hub, JinjaChat(hub.chat_template, hub.special_tokens_map))
    if sides is not None:
        target = _of_pieces(sides.target, type(hub).__name__, sides.library, eos)
        if sides.source is None:
            return target
        read = replace(target, renderer=sides.source, hub=sides.source, chat=sides.source)
        return replace(target, source=replace(read, decoder=sides.source.backend_tokenizer))
    # mlx_lm passes templates whether the model thinks.
    thinks = {"enable_thinking": wrapper.has_thinking}
    chat = None if wrapper._chat_template is not None else chat_of(hub, thinks)
    plain = None if chat is None else plain_of(hub, chat)
    return LoadedTokenizer(
        class_name=type(hub).__name__,
        library="Python code" if _encoder(hub) is None else "tokenizers",
        renderer=plain or wrapper,
        hub=plain or hub,
        encoder=_encoder(hub),
        decoder=_decoder(hub),
        chat=chat,
        has_chat_template=wrapper.has_chat_template or hub.chat_template is not None,
        eos_ids=eos,
    )


def _of_pieces(
    tokenizer: PieceTokenizer, class_name: str, library: str, eos_ids: frozenset[int]
) -> LoadedTokenizer:
    return LoadedTokenizer(
        class_name=class_name,
        library=library,
        renderer=tokenizer,
        hub=tokenizer,
        encoder=None,
        decoder=tokenizer.backend_tokenizer,
        chat=tokenizer,
        has_chat_template=tokenizer.chat_template is not None,
        eos_ids=eos_ids,
    )


def load_with_transformers(folder: Path, *, trust_remote_code: bool = False) -> HubTokenizer:
    """Return the tokenizer of a folder."""
    with _without_advice():
        loaded: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if loaded.chat_template is None:
        loaded.chat_template = processor_template(folder)
    return loaded


@contextlib.contextmanager
def _without_advice() -> Generator[None]:
    """Hide that Marian's class wants a package, which it does not use to encode."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Recommended: pip install sacremoses")
        yield


def chat_of(hub: Any, defaults: Mapping[str, Any]) -> JinjaChat | None:
    """Return what renders a tokenizer's chats without transformers; None: it has code of its own.

    ``defaults`` are variables of its templates that a caller may replace.
    """
    renders = ("apply_chat_template", "get_chat_template", "special_tokens_map")
    if not all(inherits(hub, name) and name not in vars(hub) for name in renders):
        return None
    return JinjaChat(hub.chat_template, hub.special_tokens_map, defaults)


def plain_of(hub: Any, chat: JinjaChat) -> PlainTokenizer | None:
    """Return a tokenizer without transformers that does the same; None if there is none.

    ``chat`` renders as ``hub`` does; see ``chat_of``.
    """
    backend = _encoder(hub)
    return None if backend is None else PlainTokenizer(backend, chat)


def inherits(tokenizer: object, method: str, base: type = PreTrainedTokenizerBase) -> bool:
    """True if a tokenizer's method is the one of ``base``, and not overridden by its class."""
    return getattr(type(tokenizer), method, None) is getattr(base, method)


def _encoder(tokenizer: HubTokenizer) -> Tokenizer | None:
    """Return the Rust tokenizer if the Python class adds nothing to its encoding, else None."""
    is_plain = (
        isinstance(tokenizer, TokenizersBackend)
        and inherits(tokenizer, "encode")
        and inherits(tokenizer, "_encode_plus", TokenizersBackend)
        and inherits(tokenizer, "decode")
    )
    return _backend(tokenizer) if is_plain else None


def _decoder(tokenizer: HubTokenizer) -> Tokenizer | None:
    """Return the Rust tokenizer if the Python class adds nothing to its decoding, else None."""
    return _backend(tokenizer) if inherits(tokenizer, "decode") else None


def _backend(tokenizer: HubTokenizer) -> Tokenizer | None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend if isinstance(backend, Tokenizer) else None


def _forget_truncation(tokenizer: HubTokenizer) -> None:
    """Drop truncation stored with the tokenizer: too long prompts are refused, not cut."""
    backend = _backend(tokenizer)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
