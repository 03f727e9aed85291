"""Both sides of every family encode and decode as transformers' classes do."""

from __future__ import annotations

import pickle
import random
import sys
import warnings
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from mlx_parallm.grammar.vocabulary import GrammarVocabulary
from mlx_parallm.peers.child_process import run
from mlx_parallm.tokenizer.loading import load_hub_tokenizer, load_tokenizer
from mlx_parallm.tokenizer.seq2seq.loading import load_seq2seq
from mlx_parallm.tokenizer.seq2seq.tokenizer import Seq2SeqTokenizer
from tests.builders.seq2seq_folders import (
    FAMILIES,
    TEXTS,
    read_json,
    transformers_tokenizer,
    write_json,
)

# TARGETS: the target's language for classes that cannot encode a target without one.
TARGETS = {"m2m-100": "fr"}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES[family](tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def ours(folder: Path) -> Seq2SeqTokenizer:
    return load(folder)


@pytest.fixture(scope="module")
def theirs(family: str, folder: Path) -> Any:
    options = {"tgt_lang": TARGETS[family]} if family in TARGETS else {}
    return transformers_tokenizer(folder, **options)


def load(folder: Path) -> Seq2SeqTokenizer:
    sides = load_seq2seq(folder, load_tokenizer(folder))
    assert sides is not None
    return sides


def random_ids(size: int) -> list[list[int]]:
    generator = random.Random(1)
    return [generator.choices(range(size), k=generator.randint(1, 12)) for _ in range(200)]


def test_sources(ours: Seq2SeqTokenizer, theirs: Any) -> None:
    with warnings.catch_warnings(action="ignore"):
        for text in TEXTS:
            assert ours.encode_source(text) == theirs(text).input_ids, text


def test_targets(ours: Seq2SeqTokenizer, theirs: Any) -> None:
    for text in TEXTS:
        expected = theirs(text_target=text, add_special_tokens=False).input_ids
        assert ours.encode_target(text) == expected, text


def test_decoded_targets(family: str, ours: Seq2SeqTokenizer, theirs: Any) -> None:
    # transformers decodes by the source's model where both sides share a vocabulary.
    options = {"use_source_tokenizer": False} if family.startswith("marian") else {}
    for ids in random_ids(ours.target.vocab_size):
        expected = theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False, **options
        )
        decoded = ours.target.decode(ids)
        if family == "byt5":
            # transformers drops bytes that are no UTF-8; byte-level models here write U+FFFD.
            decoded = decoded.replace("\ufffd", "")
        assert decoded == expected, ids


def test_streams_are_the_decoded_whole(ours: Seq2SeqTokenizer) -> None:
    for ids in random_ids(ours.target.vocab_size):
        stream = ours.target.detokenizer()
        text = "".join(map(stream.add, ids)) + stream.flush()
        assert text == ours.target.decode(ids), ids


def test_every_id_has_a_token(ours: Seq2SeqTokenizer) -> None:
    for side in (ours.source, ours.target):
        tokens = side.vocabulary()
        assert max(tokens.values()) + 1 == side.vocab_size
        for token, token_id in tokens.items():
            assert side.vocabulary_string(token_id) == token


def test_targets_can_have_grammars(ours: Seq2SeqTokenizer) -> None:
    tokens = ours.target
    vocabulary = GrammarVocabulary(
        tokens.backend_json, tokens.eos_ids, tokens.vocab_size, tokens.vocab_size
    )
    text = vocabulary.tokenizer.decode_bytes(tokens.encode("hallo", add_special_tokens=False))
    assert text.decode().strip() == "hallo"


def test_other_processes_need_no_transformers(ours: Seq2SeqTokenizer, tmp_path: Path) -> None:
    pickled = tmp_path / "pickled"
    pickled.write_bytes(pickle.dumps(ours))
    code = (
        "import pickle, pathlib, sys; "
        f"sides = pickle.loads(pathlib.Path({str(pickled)!r}).read_bytes()); "
        "print(sides.encode_source('the cat </s>'), sides.encode_target('die Katze')); "
        "print([name for name in ('transformers', 'mlx', 'torch') if name in sys.modules])"
    )
    expected = f"{ours.encode_source('the cat </s>')} {ours.encode_target('die Katze')}\n[]\n"
    assert run(["--", sys.executable, "-c", code], stdout=PIPE, text=True).stdout == expected


@pytest.mark.parametrize("name", ["m2m-100", "nllb"])
def test_languages_that_the_files_do_not_add(tmp_path: Path, name: str) -> None:
    folder = FAMILIES[name](tmp_path)
    settings = read_json(folder, "tokenizer_config.json")
    for key in ("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder"):
        settings.pop(key, None)
    write_json(folder, "tokenizer_config.json", settings)
    sides = load(folder)
    assert len(sides.languages) > 90
    begin = sides.encode_source("the cat")[0]
    assert sides.source.decode([begin]) == ""


@pytest.mark.parametrize(
    ("name", "description"),
    [
        ("t5", "T5Tokenizer (tokenizers), no languages"),
        ("byt5", "ByT5Tokenizer (bytes), no languages"),
        ("marian", "MarianTokenizer (sentencepiece), one for each side, 2 languages: de, en"),
        ("madlad", "T5Tokenizer (tokenizers), 3 languages: de, fr, zh_Hant"),
        ("m2m-100", "M2M100Tokenizer (sentencepiece), 100 languages: af, am, ar, ast, az, …"),
    ],
)
def test_the_description_names_the_class(tmp_path: Path, name: str, description: str) -> None:
    assert load(FAMILIES[name](tmp_path)).description == description


@pytest.mark.parametrize("name", ["marian", "marian-to-many"])
def test_a_source_has_its_spaces_on_both_sides(tmp_path: Path, name: str) -> None:
    sides = load(FAMILIES[name](tmp_path))
    ids = sides.encode_source("the cat saw two birds")
    assert sides.source.decode(ids) == sides.target.decode(ids) == "the cat saw two birds"


def test_pegasus_has_its_pretraining_tokens_before_all_pieces(tmp_path: Path) -> None:
    sides = load(FAMILIES["pegasus"](tmp_path))
    strings = [sides.target.vocabulary_string(token_id) for token_id in range(106)]
    assert strings[:5] == ["<pad>", "</s>", "<mask_1>", "<mask_2>", "<unk_2>"]
    assert strings[104:] == ["<unk_102>", "<unk>"]
    assert min(sides.encode_target("the cat saw two birds")) > 105


def test_transformers_tokenizer_of_marian_gives_no_advice(tmp_path: Path) -> None:
    hub = load_hub_tokenizer(FAMILIES["marian"](tmp_path))
    assert type(hub).__name__ == "MarianTokenizer"


def test_each_side_of_marian_has_its_own_ids_of_special_tokens(tmp_path: Path) -> None:
    folder = FAMILIES["marian-separate"](tmp_path)
    tokens = [token for token in read_json(folder, "target_vocab.json") if token != "<pad>"]
    ids = {token: token_id for token_id, token in enumerate([*tokens, "<pad>"])}
    write_json(folder, "target_vocab.json", ids)
    sides = load(folder)
    assert sides.source.token_id("<pad>") == 2
    assert sides.target.token_id("<pad>") == ids["<pad>"] > 2
    assert sides.target.decode([ids["<pad>"]]) == ""
    assert sides.target.decode([2]) != ""
