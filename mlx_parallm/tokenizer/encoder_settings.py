"""Settings of encoders' tokenizers that stand beside ``tokenizer.json`` and change what it does.

transformers makes the normaliser of BERT's and DeBERTa's classes anew from
``tokenizer_config.json``, and sentence-transformers puts one for lower case before it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from mlx_parallm.types.json_values import is_object

Settings = Mapping[str, Any]
Normalizer = dict[str, Any] | None

#: ``CLASSES``: the classes of tokenizers by model type, if ``tokenizer_config.json`` names none.
CLASSES = {
    "bert": "BertTokenizer",
    "deberta-v2": "DebertaV2Tokenizer",
    "distilbert": "BertTokenizer",
    "electra": "BertTokenizer",
    "mpnet": "MPNetTokenizer",
    "nomic_bert": "BertTokenizer",
    "roberta": "RobertaTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
}
#: ``BERT_CLASSES``: classes whose normaliser is BERT's, made from the settings.
BERT_CLASSES = frozenset(
    {"BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MPNetTokenizer"}
)
DEBERTA = "DebertaV2Tokenizer"
#: ``MODELS``: the models of the tokenizers that these classes make.
MODELS = {**dict.fromkeys(BERT_CLASSES, "WordPiece"), DEBERTA: "Unigram"}
#: ``UNTYPED``: classes that give a model no token types, unless ``model_input_names`` has them.
UNTYPED = frozenset(
    {
        *("DistilBertTokenizer", "MPNetTokenizer", "RobertaTokenizer", "XLMRobertaTokenizer"),
        *("PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend"),
    }
)
TYPES = "token_type_ids"
TOKENIZER_CONFIG = "tokenizer_config.json"
LOWERCASE: dict[str, Any] = {"type": "Lowercase"}


def read_backend(folder: Path) -> Tokenizer:
    """Return the tokenizer in a folder's ``tokenizer.json``, as the other files set it.

    Raises:
        ValueError: a file is not JSON.
        OSError: a file cannot be read.
    """
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    parts = json.loads(text)
    normalizer = parts.get("normalizer")
    name = _class(folder)
    if parts["model"].get("type") == MODELS.get(name):
        normalizer = _set(normalizer, name, _read(folder, TOKENIZER_CONFIG))
    if _read(folder, "sentence_bert_config.json").get("do_lower_case"):
        normalizer = _lowered(normalizer)
    if normalizer != parts.get("normalizer"):
        text = json.dumps(parts | {"normalizer": normalizer})
    return Tokenizer.from_str(text)


def has_token_types(folder: Path) -> bool:
    """True if a folder's model takes token types, which mark the tokens of a second text."""
    names = _read(folder, TOKENIZER_CONFIG).get("model_input_names")
    return _class(folder) not in UNTYPED if names is None else TYPES in names


def _class(folder: Path) -> str:
    """Return the name of transformers' class; empty if it is not known."""
    name = _read(folder, TOKENIZER_CONFIG).get("tokenizer_class")
    if name is None:
        name = CLASSES.get(str(_read(folder, "config.json").get("model_type")), "")
    return name if name == "PreTrainedTokenizerFast" else str(name).removesuffix("Fast")


def _set(normalizer: Normalizer, name: str, settings: Settings) -> Normalizer:
    """Return the normaliser that a class has with these settings."""
    if name in BERT_CLASSES:
        return {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": settings.get("tokenize_chinese_chars", True),
            "strip_accents": settings.get("strip_accents"),
            "lowercase": settings.get("do_lower_case", True),
        }
    if name != DEBERTA:
        return normalizer
    others = [part for part in _parts(normalizer) if part != LOWERCASE]
    return _joined([LOWERCASE, *others] if settings.get("do_lower_case") else others)


def _lowered(normalizer: Normalizer) -> Normalizer:
    parts = _parts(normalizer)
    return normalizer if LOWERCASE in parts else _joined([LOWERCASE, *parts])


def _parts(normalizer: Normalizer) -> list[dict[str, Any]]:
    if normalizer is None:
        return []
    return normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]


def _joined(parts: list[dict[str, Any]]) -> Normalizer:
    return {"type": "Sequence", "normalizers": parts} if parts else None


def _read(folder: Path, name: str) -> Settings:
    """Return the JSON object in a file; empty if there is no file or object."""
    file = folder / name
    if not file.exists():
        return {}
    content = json.loads(file.read_text(encoding="utf-8"))
    return content if is_object(content) else {}
