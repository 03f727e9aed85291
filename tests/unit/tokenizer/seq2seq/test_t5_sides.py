"""T5's two sides are those of transformers' class, and tasks put their texts before sources."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.tokenizer.loading import load_tokenizer
from mlx_parallm.tokenizer.seq2seq.loading import load_seq2seq
from mlx_parallm.tokenizer.seq2seq.tokenizer import Seq2SeqTokenizer
from mlx_parallm.types.errors import ContextLengthError, InvalidRequestError
from mlx_parallm.types.token_limit import TokenLimit
from tests.builders.seq2seq_folders import TEXTS, transformers_tokenizer, write_t5

TASKS = {
    "summarization": {"prefix": "summarize: ", "num_beams": 4},
    "translation_en_to_de": {"prefix": "translate English to German: ", "num_beams": 3},
    "translation_en_to_fr": {"prefix": "translate English to French: "},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_t5(tmp_path_factory.mktemp("t5"), task_specific_params=TASKS)


@pytest.fixture(scope="module")
def ours(folder: Path) -> Seq2SeqTokenizer:
    sides = load_seq2seq(folder, load_tokenizer(folder))
    assert sides is not None
    return sides


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return transformers_tokenizer(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_a_source_and_a_target_are_those_of_transformers(
    ours: Seq2SeqTokenizer, theirs: Any, text: str
) -> None:
    assert ours.encode_source(text) == theirs(text).input_ids
    assert ours.encode_target(text) == theirs(text_target=text).input_ids[:-1]


def test_no_prefix_without_a_task(ours: Seq2SeqTokenizer, theirs: Any) -> None:
    assert ours.encode_source("the cat", task=None) == theirs("the cat").input_ids


def test_the_prefix_of_a_task(ours: Seq2SeqTokenizer, theirs: Any) -> None:
    expected = theirs("summarize: the cat").input_ids
    assert ours.encode_source("the cat", task="summarization") == expected


def test_the_prefix_of_a_pair_of_languages(ours: Seq2SeqTokenizer, theirs: Any) -> None:
    expected = theirs("translate English to German: the cat").input_ids
    ids = ours.encode_source("the cat", src_lang="en", tgt_lang="de", task="translation")
    assert ids == expected
    assert ours.languages == ("de", "en", "fr")
    assert ours.task_defaults("translation", src_lang="en", tgt_lang="de").num_beams == 3
    assert ours.decoder_prompt(src_lang="en", tgt_lang="de") == [0]


@pytest.mark.parametrize(
    ("pair", "param"),
    [
        ((None, "de"), "src_lang"),
        (("en", None), "tgt_lang"),
        (("en", "xx"), "tgt_lang"),
        (("xx", "de"), "src_lang"),
        (("de", "en"), "tgt_lang"),
    ],
)
def test_pairs_that_it_does_not_know(
    ours: Seq2SeqTokenizer, pair: tuple[str | None, str | None], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        ours.encode_source("the cat", src_lang=pair[0], tgt_lang=pair[1])
    assert refused.value.param == param


def test_a_long_source_is_cut_before_its_end(ours: Seq2SeqTokenizer) -> None:
    text = "the cat saw two birds " * 9
    whole = ours.encode_source(text)
    limit = TokenLimit(most=10, cuts=True)
    assert ours.encode_source(text, limit=limit) == [*whole[:9], whole[-1]]
    left = TokenLimit(most=10, cuts=True, from_left=True)
    assert ours.encode_source(text, limit=left) == whole[-10:]
    assert ours.cut_source(whole, limit) == [*whole[:9], whole[-1]]
    with pytest.raises(ContextLengthError):
        ours.encode_source(text, limit=TokenLimit(most=10))
    with pytest.raises(ContextLengthError):
        ours.cut_source(whole, TokenLimit(most=10))


def test_it_can_be_pickled(ours: Seq2SeqTokenizer) -> None:
    copied: Seq2SeqTokenizer = pickle.loads(pickle.dumps(ours))
    assert copied.encode_source("the cat") == ours.encode_source("the cat")
    assert copied.rules == ours.rules
