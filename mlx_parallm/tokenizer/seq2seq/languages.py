"""Languages of a translation, as encoder-decoders read them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from mlx_parallm.types.errors import InvalidRequestError

# _LISTED: languages in an error message.
_LISTED = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Changes of a source and a decoder prompt by the languages of a request.

    Attributes:
        text: a text before the source.
        begin: tokens before the source's in place of the tokenizer's special tokens.
        end: likewise after them; None where the tokenizer's special tokens stay.
        start_id: the decoder's first token in place of the model's; None: the model's.
        forced_id: the token after it; None: the model's.
    """

    text: str = ""
    begin: tuple[int, ...] = ()
    end: tuple[int, ...] | None = None
    start_id: int | None = None
    forced_id: int | None = None


class Languages(Protocol):
    """The languages that a model knows and what they change."""

    @property
    def names(self) -> tuple[str, ...]:
        """The languages that requests may name, in order; empty if there are none."""
        ...

    def marks(self, src_lang: str | None, tgt_lang: str | None) -> Marks:
        """Return what a request's languages change.

        Raises:
            InvalidRequestError: the model does not know a language or the pair, has none, or needs
                the language that is missing; ``param`` is "src_lang" or "tgt_lang".
        """
        ...


def check_language(name: str | None, param: str, known: Collection[str]) -> None:
    """Raise InvalidRequestError for a language that is not known; the error lists some."""
    if name is None or name in known:
        return
    listed = sorted(known)
    some = ", ".join(listed[:_LISTED])
    more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    raise InvalidRequestError(
        f"{param} {name!r} is not a language of this model, which has {some}{more}.", param=param
    )


def _check_pair(src_lang: str | None, tgt_lang: str | None) -> None:
    if (src_lang is None) != (tgt_lang is None):
        missing = "src_lang" if src_lang is None else "tgt_lang"
        raise InvalidRequestError(
            f"{missing} is missing: this model needs src_lang and tgt_lang, or neither.",
            param=missing,
        )


@dataclass(frozen=True, slots=True)
class NoLanguages:
    """A model without languages."""

    names: tuple[str, ...] = ()

    def marks(self, src_lang: str | None, tgt_lang: str | None) -> Marks:
        """Refuse languages; see ``Languages``."""
        for name, param in ((src_lang, "src_lang"), (tgt_lang, "tgt_lang")):
            if name is not None:
                raise InvalidRequestError(
                    f"This model takes no languages: leave out {param}.", param=param
                )
        return Marks()


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageTokens:
    """Languages with a token each: of the source beside it, and of the target before the output.

    Attributes:
        ids: each language's token.
        eos_id: the token that ends a source.
        source: the language of sources that name none; None: they must.
        is_behind: True: the source's language stands behind its end (mBART, older NLLB).
        starts: True: the target's language is the decoder's first token (mBART), not the second.
    """

    ids: Mapping[str, int]
    eos_id: int
    source: str | None
    is_behind: bool = False
    starts: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The languages, in the order of their tokens."""
        return tuple(sorted(self.ids, key=lambda name: self.ids[name]))

    def marks(self, src_lang: str | None, tgt_lang: str | None) -> Marks:
        """Return the tokens of both languages; see ``Languages``."""
        check_language(src_lang, "src_lang", self.ids)
        check_language(tgt_lang, "tgt_lang", self.ids)
        _check_pair(src_lang, tgt_lang)
        source = self.source if src_lang is None else src_lang
        if source is None:
            raise InvalidRequestError(
                "src_lang is missing: this model reads the source's language.", param="src_lang"
            )
        source_id = self.ids[source]
        target_id = None if tgt_lang is None else self.ids[tgt_lang]
        return Marks(
            begin=() if self.is_behind else (source_id,),
            end=(self.eos_id, source_id) if self.is_behind else (self.eos_id,),
            start_id=target_id if self.starts else None,
            forced_id=None if self.starts else target_id,
        )


@dataclass(frozen=True, slots=True)
class TargetTexts:
    """Target languages with a text before the source, such as ``<2de>`` or ``>>deu<<``.

    Such a model finds out the source's language itself, so any is accepted.

    Attributes:
        texts: the text of each language.
    """

    texts: Mapping[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        """The languages, sorted."""
        return tuple(sorted(self.texts))

    def marks(self, src_lang: str | None, tgt_lang: str | None) -> Marks:
        """Return the text of the target's language; see ``Languages``."""
        check_language(tgt_lang, "tgt_lang", self.texts)
        if tgt_lang is None:
            _check_pair(src_lang, tgt_lang)
            return Marks()
        return Marks(text=self.texts[tgt_lang])


@dataclass(frozen=True, slots=True)
class PairTexts:
    """Pairs of languages with a text before the source each, such as T5's.

    Attributes:
        texts: the text of each pair, such as "translate English to German: "; it may be empty.
    """

    texts: Mapping[tuple[str, str], str]

    @property
    def names(self) -> tuple[str, ...]:
        """The languages of all pairs, sorted."""
        return tuple(sorted({name for pair in self.texts for name in pair}))

    def marks(self, src_lang: str | None, tgt_lang: str | None) -> Marks:
        """Return the text of a pair; see ``Languages``."""
        check_language(src_lang, "src_lang", self.names)
        check_language(tgt_lang, "tgt_lang", self.names)
        _check_pair(src_lang, tgt_lang)
        if src_lang is None or tgt_lang is None:
            return Marks()
        text = self.texts.get((src_lang, tgt_lang))
        if text is None:
            pairs = ", ".join(f"{source} to {target}" for source, target in sorted(self.texts))
            raise InvalidRequestError(
                f"This model does not translate from {src_lang} to {tgt_lang}; it does {pairs}.",
                param="tgt_lang",
            )
        return Marks(text=text)
