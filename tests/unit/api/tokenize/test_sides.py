"""``/tokenize`` and ``/detokenize`` on both sides of encoder-decoders, and their languages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from typing_extensions import override

from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.tokenizer.loading import load_tokenizer
from mlx_parallm.tokenizer.seq2seq.loading import load_seq2seq
from mlx_parallm.types.model_input import InputKind
from tests.builders.seq2seq_folders import FAMILIES
from tests.fake_engine import FakeEngine, serve_fake
from tests.fakes import make_info

MAX_SOURCE_LEN = 100
TEXT = "the cat saw two birds"


class SeveralModels(FakeEngine):
    """An engine with a model for each folder, and a decoder."""

    def __init__(self, folders: dict[str, Path]) -> None:
        super().__init__()
        self._models: tuple[GenerationModel, ...] = ()
        self._models = tuple(self._read(name, folder) for name, folder in folders.items())

    def _read(self, name: str, folder: Path) -> GenerationModel:
        tokenizer = load_tokenizer(folder)
        info = make_info(
            vocab_size=tokenizer.vocab_size,
            max_source_len=MAX_SOURCE_LEN,
            input_kinds=frozenset({InputKind.SOURCE}),
        )
        return replace(
            FakeEngine().first_model(),
            names=(name,),
            tokenizer=tokenizer,
            info=info,
            seq2seq=load_seq2seq(folder, tokenizer),
        )

    @override
    def models(self) -> tuple[GenerationModel, ...]:
        return (*self._models, *super().models())

    @override
    def get_model(self, name: str) -> GenerationModel:
        own = (model for model in self._models if name in model.names)
        return next(own, None) or super().get_model(name)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> SeveralModels:
    names = ("t5", "marian", "marian-separate", "nllb", "madlad")
    return SeveralModels({name: FAMILIES[name](tmp_path_factory.mktemp(name)) for name in names})


@pytest.fixture(scope="module")
def url(engine: SeveralModels) -> Iterator[str]:
    with serve_fake(engine) as url:
        yield url


def post(url: str, path: str, **body: Any) -> httpx2.Response:
    return httpx2.post(f"{url}{path}", json=body)


def tokens(url: str, **body: Any) -> list[int]:
    answer = post(url, "/tokenize", prompt=TEXT, **body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["count"] == len(answer.json()["tokens"])
    return answer.json()["tokens"]


@pytest.mark.parametrize("name", ["t5", "marian", "marian-separate", "nllb", "madlad"])
def test_a_text_is_a_source_unless_the_body_says_otherwise(
    url: str, engine: SeveralModels, name: str
) -> None:
    sides = engine.get_model(name).seq2seq
    assert sides is not None
    assert tokens(url, model=name) == tokens(url, model=name, side="source")
    assert tokens(url, model=name) == sides.encode_source(TEXT)
    written = tokens(url, model=name, side="target")
    assert written == [*sides.decoder_prompt(), *sides.encode_target(TEXT)]
    bare = tokens(url, model=name, side="target", add_special_tokens=False)
    assert bare == sides.encode_target(TEXT)


def test_each_side_has_its_own_tokens_and_length(url: str) -> None:
    model: Any = {"model": "marian-separate", "return_token_strs": True}
    source = post(url, "/tokenize", prompt="the cat", **model).json()
    assert source["token_strs"] == ["\u2581the", "\u2581cat", "</s>"]
    assert source["max_model_len"] == MAX_SOURCE_LEN
    target = post(url, "/tokenize", prompt="die Katze", side="target", **model).json()
    assert target["token_strs"] == ["<pad>", "\u2581die", "\u2581Katze"]
    assert target["max_model_len"] == make_info().max_model_len


@pytest.mark.parametrize(
    ("side", "text"), [(None, "the cat"), ("source", "the cat"), ("target", "die Katze")]
)
def test_tokens_become_the_text_of_their_side(url: str, side: str | None, text: str) -> None:
    body: Any = {"model": "marian-separate"} | ({"side": side} if side else {})
    ids = post(url, "/tokenize", prompt=text, add_special_tokens=False, **body).json()["tokens"]
    assert post(url, "/detokenize", tokens=ids, **body).json() == {"prompt": text}


def test_languages_stand_beside_the_text(url: str, engine: SeveralModels) -> None:
    pair = {"src_lang": "fra_Latn", "tgt_lang": "deu_Latn"}
    string = engine.get_model("nllb").tokenizer.vocabulary_string
    assert string(tokens(url, model="nllb", **pair)[0]) == "fra_Latn"
    assert string(tokens(url, model="nllb", side="target", **pair)[1]) == "deu_Latn"


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"model": "nllb", "src_lang": "xx", "tgt_lang": "deu_Latn"}, "src_lang", "ace_Arab"),
        ({"model": "nllb", "src_lang": "deu_Latn", "tgt_lang": "xx"}, "tgt_lang", "ace_Arab"),
        ({"model": "nllb", "src_lang": "deu_Latn"}, "tgt_lang", "missing"),
        ({"model": "nllb", "tgt_lang": "deu_Latn"}, "src_lang", "missing"),
        ({"model": "nllb", "side": "target", "tgt_lang": "xx"}, "tgt_lang", "ace_Arab"),
        ({"model": "madlad", "tgt_lang": "xx"}, "tgt_lang", "de, fr, zh_Hant"),
        ({"model": "t5", "tgt_lang": "de"}, "tgt_lang", "takes no languages"),
        ({"model": "t5", "src_lang": "de"}, "src_lang", "takes no languages"),
        ({"model": "t5", "side": "both"}, "side", "source"),
        ({"model": "nllb", "src_lang": 3, "tgt_lang": "deu_Latn"}, "src_lang", "string"),
        ({"side": "source"}, "side", "not an encoder-decoder"),
        ({"src_lang": "de"}, "src_lang", "not an encoder-decoder"),
        ({"tgt_lang": "de"}, "tgt_lang", "not an encoder-decoder"),
    ],
)
def test_what_does_not_fit_is_refused(
    url: str, engine: SeveralModels, body: dict[str, Any], param: str, says: str
) -> None:
    body = {"model": engine.models()[-1].names[0]} | body
    answer = post(url, "/tokenize", prompt=TEXT, **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert says in answer.json()["error"]["message"]


@pytest.mark.parametrize("field", [{"side": "target"}, {"tgt_lang": "deu_Latn"}])
def test_a_conversation_is_a_source_without_languages(url: str, field: dict[str, str]) -> None:
    messages = [{"role": "user", "content": TEXT}]
    answer = post(url, "/tokenize", model="nllb", messages=messages, **field)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == next(iter(field))


def test_a_decoder_has_no_sides_to_detokenize(url: str, engine: SeveralModels) -> None:
    name = engine.models()[-1].names[0]
    answer = post(url, "/detokenize", model=name, tokens=[1], side="source")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "side"


def test_facts_about_a_tokenizer(url: str, engine: SeveralModels) -> None:
    for model in engine.models():
        answer = httpx2.get(f"{url}/tokenizer_info", params={"model": model.names[0]}).json()
        assert answer["vocab_size"] == model.tokenizer.vocab_size
        assert set(answer["eos_token_ids"]) == model.tokenizer.eos_ids
        assert answer.get("chat_template") == model.tokenizer.chat_template
        assert isinstance(answer["tokenizer_class"], str)
    assert httpx2.get(f"{url}/tokenizer_info", params={"model": "none"}).status_code == 404
