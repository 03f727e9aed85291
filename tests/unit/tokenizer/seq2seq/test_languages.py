"""Languages stand where transformers' classes put them, and wrong ones are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_parallm.tokenizer.loading import load_tokenizer
from mlx_parallm.tokenizer.seq2seq.loading import load_seq2seq
from mlx_parallm.tokenizer.seq2seq.tokenizer import Seq2SeqTokenizer
from mlx_parallm.types.errors import InvalidRequestError, ModelLoadError
from tests.builders.seq2seq_folders import (
    FAMILIES,
    read_json,
    transformers_tokenizer,
    write_config,
    write_json,
    write_marian,
    write_mbart,
    write_nllb,
)

# PAIRS: languages of the families with a token for each.
PAIRS = {
    "mbart": ("de_DE", "fr_XX"),
    "mbart-50": ("de_DE", "gl_ES"),
    "nllb": ("deu_Latn", "zho_Hant"),
    "nllb-legacy": ("deu_Latn", "zho_Hant"),
    "m2m-100": ("de", "zu"),
}
# TEXTS_BEFORE: likewise of those with a text for the target.
TEXTS_BEFORE = {"madlad": ("zh_Hant", "<2zh_Hant> "), "marian-to-many": ("fra", ">>fra<< ")}
TEXT = "the cat saw two birds"


def load(folder: Path) -> Seq2SeqTokenizer:
    sides = load_seq2seq(folder, load_tokenizer(folder))
    assert sides is not None
    return sides


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write(tmp_path_factory.mktemp(name)) for name, write in FAMILIES.items()}


@pytest.mark.parametrize("family", PAIRS)
def test_tokens_of_a_pair(folders: dict[str, Path], family: str) -> None:
    source, target = PAIRS[family]
    ours = load(folders[family])
    theirs = transformers_tokenizer(folders[family])
    options = {} if family == "m2m-100" else {"return_tensors": None}
    expected = theirs._build_translation_inputs(TEXT, src_lang=source, tgt_lang=target, **options)
    assert ours.encode_source(TEXT, src_lang=source, tgt_lang=target) == expected["input_ids"]
    language = expected["forced_bos_token_id"]
    # mBART was trained with the language in place of the start token.
    begin = [language] if family == "mbart" else [2, language]
    assert ours.decoder_prompt(src_lang=source, tgt_lang=target) == begin


@pytest.mark.parametrize("family", PAIRS)
def test_every_language_is_known(folders: dict[str, Path], family: str) -> None:
    ours = load(folders[family])
    counts = {"mbart": 25, "mbart-50": 52, "nllb": 202, "nllb-legacy": 202, "m2m-100": 100}
    assert len(ours.languages) == counts[family]
    for language in ours.languages:
        assert ours.decoder_prompt(src_lang=language, tgt_lang=language)[-1] not in (0, 1, 2, 3)


@pytest.mark.parametrize("family", TEXTS_BEFORE)
def test_a_text_names_the_target(folders: dict[str, Path], family: str) -> None:
    target, text = TEXTS_BEFORE[family]
    ours = load(folders[family])
    theirs = transformers_tokenizer(folders[family])
    expected = theirs(text + TEXT).input_ids
    assert ours.encode_source(TEXT, tgt_lang=target) == expected
    assert ours.encode_source(TEXT, src_lang="en", tgt_lang=target) == expected
    assert "translate" not in ours.languages
    assert ours.decoder_prompt(tgt_lang=target) == ours.decoder_prompt()


def test_one_pair_of_marian(folders: dict[str, Path]) -> None:
    ours = load(folders["marian"])
    assert ours.encode_source(TEXT, src_lang="en", tgt_lang="de") == ours.encode_source(TEXT)
    with pytest.raises(InvalidRequestError, match="does not translate from de to en; it does en"):
        ours.encode_source(TEXT, src_lang="de", tgt_lang="en")


@pytest.mark.parametrize("family", [*PAIRS, *TEXTS_BEFORE, "marian"])
@pytest.mark.parametrize("param", ["src_lang", "tgt_lang"])
def test_unknown_languages_are_refused_with_a_list(
    folders: dict[str, Path], family: str, param: str
) -> None:
    if family in TEXTS_BEFORE and param == "src_lang":
        pytest.skip("such a model finds out the source's language")
    ours = load(folders[family])
    pair = dict.fromkeys(("src_lang", "tgt_lang"), ours.languages[0]) | {param: "xx"}
    with pytest.raises(InvalidRequestError, match="'xx' is not a language") as refused:
        ours.encode_source(TEXT, src_lang=pair["src_lang"], tgt_lang=pair["tgt_lang"])
    assert refused.value.param == param
    assert sorted(ours.languages)[0] in str(refused.value)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("family", [*PAIRS, *TEXTS_BEFORE, "marian"])
def test_a_source_language_alone_is_refused(folders: dict[str, Path], family: str) -> None:
    ours = load(folders[family])
    with pytest.raises(InvalidRequestError, match="tgt_lang is missing") as refused:
        ours.encode_source(TEXT, src_lang=ours.languages[0])
    assert refused.value.param == "tgt_lang"


@pytest.mark.parametrize("family", ["t5", "bart", "pegasus", "byt5"])
@pytest.mark.parametrize("param", ["src_lang", "tgt_lang"])
def test_models_without_languages_refuse_them(
    folders: dict[str, Path], family: str, param: str
) -> None:
    ours = load(folders[family])
    assert ours.languages == ()
    pair = {param: "de"}
    with pytest.raises(InvalidRequestError, match="takes no languages") as refused:
        ours.encode_source(TEXT, src_lang=pair.get("src_lang"), tgt_lang=pair.get("tgt_lang"))
    assert refused.value.param == param


def test_output_of_mbart_needs_a_language_or_a_start(tmp_path: Path) -> None:
    ours = load(write_mbart(tmp_path))
    with pytest.raises(InvalidRequestError, match="begins with its language"):
        ours.decoder_prompt()
    write_config(tmp_path, "mbart", decoder_start_token_id=9)
    assert load(tmp_path).decoder_prompt() == [9]


def test_a_forced_token_gives_way_to_the_target(tmp_path: Path) -> None:
    write_nllb(tmp_path)
    write_config(tmp_path, "m2m_100", decoder_start_token_id=2, forced_bos_token_id=50)
    ours = load(tmp_path)
    assert ours.decoder_prompt() == [2, 50]
    (start, language) = ours.decoder_prompt(src_lang="eng_Latn", tgt_lang="deu_Latn")
    assert (start, ours.target.vocabulary_string(language)) == (2, "deu_Latn")


@pytest.mark.parametrize(("named", "behind"), [(None, False), (False, False), (True, True)])
def test_where_nllb_reads_the_source_language(
    tmp_path: Path, named: bool | None, behind: bool
) -> None:
    write_nllb(tmp_path)
    settings = read_json(tmp_path, "tokenizer_config.json")
    settings.pop("legacy_behaviour")
    write_json(tmp_path, "tokenizer_config.json", settings | {"legacy_behaviour": named})
    ids = load(tmp_path).encode_source(TEXT, src_lang="fra_Latn", tgt_lang="deu_Latn")
    tokens = [load(tmp_path).source.vocabulary_string(token_id) for token_id in ids]
    assert (tokens[-2:] == ["</s>", "fra_Latn"]) == behind
    assert (tokens[0] == "fra_Latn") != behind


def test_the_class_of_a_tokenizer_may_be_left_out(tmp_path: Path) -> None:
    write_marian(tmp_path)
    settings = read_json(tmp_path, "tokenizer_config.json")
    del settings["tokenizer_class"]
    write_json(tmp_path, "tokenizer_config.json", settings)
    assert load(tmp_path).languages == ("de", "en")


@pytest.mark.parametrize("family", ["mbart", "nllb"])
def test_the_class_of_a_tokenizer_may_be_the_general_one(tmp_path: Path, family: str) -> None:
    folder = FAMILIES[family](tmp_path)
    source, target = PAIRS[family]
    expected = load(folder).encode_source(TEXT, src_lang=source, tgt_lang=target)
    settings = read_json(folder, "tokenizer_config.json")
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(folder, "tokenizer_config.json", settings)
    ours = load(folder)
    assert ours.description.startswith("TokenizersBackend")
    assert ours.encode_source(TEXT, src_lang=source, tgt_lang=target) == expected


def test_a_tokenizer_that_lost_its_languages(tmp_path: Path) -> None:
    write_nllb(tmp_path)
    tokens = read_json(tmp_path, "tokenizer.json")
    tokens["added_tokens"] = [each for each in tokens["added_tokens"] if each["id"] < 4]
    write_json(tmp_path, "tokenizer.json", tokens)
    settings = read_json(tmp_path, "tokenizer_config.json")
    write_json(tmp_path, "tokenizer_config.json", settings | {"extra_special_tokens": []})
    with pytest.raises(ModelLoadError, match="no tokens of languages"):
        load(tmp_path)
