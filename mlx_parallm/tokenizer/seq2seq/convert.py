"""Makes tokenizers without transformers of those that it has as Python code alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from mlx_parallm.tokenizer.jinja_chat import JinjaChat
from mlx_parallm.tokenizer.seq2seq.pieces import BytePieces, PieceTokenizer, VocabularyPieces
from mlx_parallm.tokenizer.vocabulary import gpt2_byte_map

# _ENDS matches the spaces around a text. The library's Strip fails for a text of spaces alone.
_ENDS = r"\A\s+|\s+\z"


class Sides(NamedTuple):
    """A tokenizer's sides, and what splits texts.

    ``target`` writes texts; ``source`` is None if it reads them too.
    """

    target: PieceTokenizer
    source: PieceTokenizer | None = None
    library: str = "sentencepiece"


def piece_sides(hub: Any, chat: JinjaChat) -> Sides | None:
    """Return the sides of one of transformers' tokenizers; None if it is of another class."""
    own = cast("type[Any]", type(hub))
    # A subclass, such as one that comes with a model, may do something else.
    is_known = own.__module__.startswith("transformers.") and own.__name__ in _CONVERTERS
    return _CONVERTERS[own.__name__](hub, chat) if is_known else None


def _m2m_100(hub: Any, chat: JinjaChat) -> Sides:
    # The class names its languages in the vocabulary, whether or not its files add their tokens.
    languages = {token_id: _special(token) for token, token_id in hub.lang_token_to_id.items()}
    added = _added(hub) | languages
    ids = {**hub.encoder, **hub.lang_token_to_id}
    pieces = VocabularyPieces(hub.sp_model, ids, hub.encoder[hub.unk_token])
    begin, end = hub.prefix_tokens, hub.suffix_tokens
    return Sides(PieceTokenizer(_writer(ids, added), chat, pieces, begin=begin, end=end))


def _marian(hub: Any, chat: JinjaChat) -> Sides:
    targets = hub.target_encoder if hub.separate_vocabs else hub.encoder

    def side(ids: Mapping[str, int], model: Any) -> PieceTokenizer:
        added = {ids.get(each.content, i): each for i, each in _added(hub).items()}
        pieces = VocabularyPieces(model, ids, ids[hub.unk_token], has_codes=True)
        return PieceTokenizer(_writer(ids, added), chat, pieces, end=[ids[hub.eos_token]])

    return Sides(side(targets, hub.spm_target), side(hub.encoder, hub.spm_source))


def _byt5(hub: Any, chat: JinjaChat) -> Sides:
    added = _added(hub)
    offset: int = hub.offset
    ids = {sign: offset + byte for sign, byte in gpt2_byte_map().items()}
    backend = Tokenizer(models.BPE(ids | _ids_of(added), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    _add(backend, added)
    end = [hub.eos_token_id]
    target = PieceTokenizer(backend, chat, BytePieces(offset), end=end, ends_once=True)
    return Sides(target, library="bytes")


_CONVERTERS: Mapping[str, Callable[[Any, JinjaChat], Sides]] = {
    "M2M100Tokenizer": _m2m_100,
    "MarianTokenizer": _marian,
    "ByT5Tokenizer": _byt5,
}


def _writer(ids: Mapping[str, int], added: Mapping[int, AddedToken]) -> Tokenizer:
    """Return a Rust tokenizer that decodes pieces as sentencepiece does; it cannot encode.

    Spaces around the whole text are left out, as these classes do.
    """
    backend = Tokenizer(models.WordLevel({**ids, **_ids_of(added)}, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Replace(Regex(_ENDS), ""),
        ]
    )
    _add(backend, added)
    return backend


def _add(backend: Tokenizer, added: Mapping[int, AddedToken]) -> None:
    """Add tokens that the model's vocabulary has, so that their ids stay."""
    backend.add_tokens([added[token_id] for token_id in sorted(added)])  # type: ignore[reportUnknownMemberType]


def _ids_of(added: Mapping[int, AddedToken]) -> dict[str, int]:
    return {token.content: token_id for token_id, token in added.items()}


def _added(hub: Any) -> dict[int, AddedToken]:
    """Return the added tokens by their ids; those that the class calls special are so."""
    special = set(hub.all_special_ids)
    return {
        token_id: _special(token.content, lstrip=token.lstrip, rstrip=token.rstrip)
        if token_id in special
        else token
        for token_id, token in hub.added_tokens_decoder.items()
    }


def _special(content: str, *, lstrip: bool = False, rstrip: bool = False) -> AddedToken:
    return AddedToken(content, special=True, normalized=False, lstrip=lstrip, rstrip=rstrip)
