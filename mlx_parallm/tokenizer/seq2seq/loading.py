"""Loads the two sides of an encoder-decoder's tokenizer from its folder."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from mlx_parallm.tokenizer.seq2seq.fields import Fields
from mlx_parallm.tokenizer.seq2seq.languages import (
    Languages,
    LanguageTokens,
    NoLanguages,
    PairTexts,
    TargetTexts,
)
from mlx_parallm.tokenizer.seq2seq.rules import Seq2SeqRules, read_rules
from mlx_parallm.tokenizer.seq2seq.tokenizer import Seq2SeqTokenizer
from mlx_parallm.tokenizer.tokenizer import ParallmTokenizer
from mlx_parallm.types.errors import ModelLoadError

logger = logging.getLogger(__name__)
# _CLASSES: the class by whose rules a tokenizer without a class of its own reads languages. M2M-100
# itself has no fast tokenizer.
_CLASSES = {"m2m_100": "NllbTokenizer", "mbart": "MBartTokenizer"}
_GENERIC = "TokenizersBackend"
# _CODES: how the classes with a token per language write it, and the source's language by default.
_CODES = {
    "MBartTokenizer": (re.compile(r"([a-z]{2,3}_[A-Z]{2})"), "en_XX"),
    "MBart50Tokenizer": (re.compile(r"([a-z]{2,3}_[A-Z]{2})"), "en_XX"),
    "NllbTokenizer": (re.compile(r"([a-z]{3}_[A-Z][a-z]{3})"), "eng_Latn"),
    "M2M100Tokenizer": (re.compile(r"__([a-z]{2,3})__"), "en"),
}
# _MARIAN: a token of Marian's that names the target's language.
_MARIAN = re.compile(r">>(.+)<<")
# _MADLAD: a token of MADLAD-400 that names the target's language; others name tasks.
_MADLAD = re.compile(r"<2([a-z]{2,3}(?:_[A-Za-z]{2,4})?)>")
_PAIR = re.compile(r"translation_(\w+)_to_(\w+)")


def load_seq2seq(folder: Path, tokenizer: ParallmTokenizer) -> Seq2SeqTokenizer | None:
    """Return the two sides of an encoder-decoder; None if the folder has another model.

    Args:
        folder: a local folder with ``config.json``.
        tokenizer: the folder's tokenizer, which writes the decoder's texts.

    Raises:
        ModelLoadError: a file is not JSON, or has a value that it cannot have.
    """
    rules = read_rules(folder)
    if rules is None:
        return None
    if rules.unserved:
        logger.warning(
            "%s: these fields of its files change nothing: %s", folder, ", ".join(rules.unserved)
        )
    settings = Fields.read(folder / "tokenizer_config.json") or Fields(folder, {})
    languages = _languages(settings, rules, tokenizer)
    return Seq2SeqTokenizer(tokenizer.source_side, tokenizer, rules, languages)


def _languages(settings: Fields, rules: Seq2SeqRules, tokenizer: ParallmTokenizer) -> Languages:
    name = tokenizer.class_name.removesuffix("Fast")
    if name == _GENERIC:
        name = _CLASSES.get(rules.model_type, name)
    if name in _CODES:
        return _language_tokens(name, settings, tokenizer)
    is_marian = name == "MarianTokenizer"
    code = _MARIAN if is_marian else _MADLAD
    targets = _matches(code, tokenizer.source_side.vocabulary())
    if targets:
        return TargetTexts({language: f"{token} " for language, token in targets.items()})
    if is_marian:
        return _one_pair(settings.text("source_lang"), settings.text("target_lang"))
    pairs = {
        (match[1], match[2]): defaults.prefix
        for task, defaults in rules.tasks.items()
        if (match := _PAIR.fullmatch(task))
    }
    return PairTexts(pairs) if pairs else NoLanguages()


def _one_pair(source: str | None, target: str | None) -> Languages:
    """Return the pair that a model translates, if its files name it."""
    return PairTexts({(source, target): ""}) if source and target else NoLanguages()


def _language_tokens(name: str, settings: Fields, tokenizer: ParallmTokenizer) -> LanguageTokens:
    code, usual = _CODES[name]
    eos_token = settings.values.get("eos_token", "</s>")
    eos_id = tokenizer.token_id(eos_token if isinstance(eos_token, str) else "</s>")
    if eos_id is None:
        raise ModelLoadError("The tokenizer has no token that ends a source (eos_token).")
    vocabulary = tokenizer.vocabulary()
    tokens = _matches(code, tokenizer.special_tokens)
    ids = {language: vocabulary[token] for language, token in tokens.items()}
    if not ids:
        raise ModelLoadError(f"The tokenizer ({name}) has no tokens of languages.")
    source = settings.text("src_lang") or usual
    return LanguageTokens(
        ids=ids,
        eos_id=eos_id,
        source=source if source in ids else None,
        is_behind=name == "MBartTokenizer" or settings.flag("legacy_behaviour"),
        starts=name == "MBartTokenizer",
    )


def _matches(code: re.Pattern[str], tokens: Iterable[str]) -> Mapping[str, str]:
    """Return the tokens that name languages, by language."""
    return {match[1]: token for token in tokens if (match := code.fullmatch(token))}
