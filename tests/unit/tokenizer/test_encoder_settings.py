"""Encoders' tokenizers do what transformers' classes make of the same folder."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers
from transformers import AutoTokenizer

from mlx_parallm.tokenizer.encoder_tokenizer import load_encoder_tokenizer
from tests.task_tokenizers import unigram, wordpiece

TEXTS = [
    "the CAT in Paris",
    "th\u00e9 c\u00e0t \u00c9 is",
    "\u4e2d the\u6587 cat\x00s",
    "The  cat\n",
]
PAIR = ("the cat", "is good")
ABSENT = object()
FIELDS: dict[str, list[Any]] = {
    "do_lower_case": [ABSENT, True, False],
    "strip_accents": [ABSENT, None, True, False],
    "tokenize_chinese_chars": [ABSENT, False],
}
NAMES: list[Any] = [
    ABSENT,
    ["input_ids", "attention_mask"],
    ["input_ids", "token_type_ids", "attention_mask"],
]


def write(
    folder: Path,
    class_name: str | None,
    settings: dict[str, Any],
    *,
    model_type: str = "bert",
    lowercase: bool = True,
) -> Path:
    is_deberta = model_type == "deberta-v2"
    tokenizer, names = unigram() if is_deberta else wordpiece()
    if not is_deberta:
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {name: value for name, value in settings.items() if value is not ABSENT}
    if class_name is not None:
        config["tokenizer_class"] = class_name
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, **config}))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def assert_as_transformers(folder: Path) -> None:
    ours, theirs = load_encoder_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))
    for text in TEXTS:
        assert list(ours.encode([text])[0]) == theirs(text)["input_ids"], text
    ((ids, second),) = ours.encode_pairs([PAIR])
    encoded = theirs(*PAIR)
    assert list(ids) == encoded["input_ids"]
    types = encoded.get("token_type_ids", [0])
    assert second == (types.index(1) if 1 in types else None)


@pytest.mark.parametrize("class_name", ["BertTokenizer", "BertTokenizerFast", None])
@pytest.mark.parametrize("lowercase", [True, False])
def test_berts_settings_are_read(tmp_path: Path, class_name: str | None, lowercase: bool) -> None:
    for values in itertools.product(*FIELDS.values()):
        settings = dict(zip(FIELDS, values, strict=True))
        assert_as_transformers(write(tmp_path, class_name, settings, lowercase=lowercase))


@pytest.mark.parametrize(
    ("class_name", "model_type"),
    [
        ("BertTokenizer", "bert"),
        ("ElectraTokenizer", "electra"),
        ("DistilBertTokenizer", "distilbert"),
        ("DistilBertTokenizerFast", "distilbert"),
        ("PreTrainedTokenizerFast", "bert"),
        ("TokenizersBackend", "modernbert"),
        (None, "electra"),
        (None, "distilbert"),
    ],
)
@pytest.mark.parametrize("names", NAMES)
def test_each_class_has_its_own_defaults(
    tmp_path: Path, class_name: str | None, model_type: str, names: Any
) -> None:
    for lower in (ABSENT, True, False):
        settings = {"model_input_names": names, "do_lower_case": lower}
        assert_as_transformers(
            write(tmp_path, class_name, settings, model_type=model_type, lowercase=False)
        )


@pytest.mark.parametrize("lower", [ABSENT, True, False])
def test_debertas_settings_are_read(tmp_path: Path, lower: Any) -> None:
    folder = write(
        tmp_path, "DebertaV2Tokenizer", {"do_lower_case": lower}, model_type="deberta-v2"
    )
    ours, theirs = load_encoder_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))
    # transformers has another id for unknown tokens than the file.
    known = {theirs.unk_token_id: 3, 1: 3}
    ids = theirs(TEXTS[0], add_special_tokens=False)["input_ids"]
    words = ours.encode([TEXTS[0]], add_special_tokens=False)[0]
    assert list(words) == [known.get(number, number) for number in ids]
    assert (3 in words) is (lower is not True)


@pytest.mark.parametrize("lowercase", [True, False])
def test_sentence_transformers_makes_texts_lower_case_first(
    tmp_path: Path, lowercase: bool
) -> None:
    settings = {"do_lower_case": False, "strip_accents": False}
    folder = write(tmp_path, "BertTokenizer", settings, lowercase=lowercase)
    plain = load_encoder_tokenizer(folder).encode(["the CAT", "the cat"])
    assert plain[0] != plain[1]
    (folder / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    lowered = load_encoder_tokenizer(folder).encode(["the CAT", "the cat"])
    assert lowered[0] == lowered[1] == plain[1]
