"""Tasks of encoder-decoders, by Hugging Face's own client where it has a method."""

from __future__ import annotations

import json
import math
import queue
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from mlx_parallm.types.beams import BeamParams
from mlx_parallm.types.request import SamplingParams
from tests.byte_vocabulary import ByteVocabulary
from tests.fake_encoders import FakeEncoders, make_encoder
from tests.fake_engine import serve_fake, write
from tests.fake_seq2seq import (
    BANNED,
    ENGLISH,
    GERMAN,
    MAX_SOURCE_LEN,
    NAME,
    START,
    FakeSeq2Seq,
    decoder_model,
    seq2seq_model,
    source_ids,
    taken,
)
from tests.fakes import EOS


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeSeq2Seq, str]]:
    engine = FakeSeq2Seq()
    with serve_fake(engine) as url:
        yield engine, url


@pytest.fixture
def engine(served: tuple[FakeSeq2Seq, str]) -> FakeSeq2Seq:
    served[0].submitted = queue.Queue()
    served[0].script = write("hello")
    return served[0]


@pytest.fixture
def url(served: tuple[FakeSeq2Seq, str]) -> str:
    return served[1]


def ask(url: str, path: str, body: dict[str, Any]) -> Any:
    answer = httpx2.post(url + path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def params_of(engine: FakeSeq2Seq, url: str, parameters: dict[str, Any]) -> SamplingParams:
    """Return the engine's parameters of a request with these."""
    ask(url, "/pipeline/text2text-generation", {"inputs": "hi", "parameters": parameters})
    return taken(engine).params


@pytest.mark.parametrize("path", ["", f"/models/{NAME}", f"/pipeline/translation/{NAME}"])
def test_translation(engine: FakeSeq2Seq, url: str, path: str) -> None:
    client = InferenceClient(url + path)
    output = client.translation(
        "hi", src_lang="en", tgt_lang="de", generate_parameters={"num_beams": 2}
    )
    assert output.translation_text == "hello"
    request = taken(engine)
    assert source_ids(request.inputs[0]) == [ENGLISH, *b"hi", EOS]
    assert request.prompt_ids == (START, GERMAN)
    # The forced language counts as generated.
    assert request.params.beams == BeamParams(width=2, length_penalty=2.0, num_counted=1)


@pytest.mark.parametrize(
    ("task", "parameters", "language"),
    [
        ("translation_en_to_de", {}, GERMAN),
        ("translation_en_to_de", {"src_lang": "de", "tgt_lang": "en"}, ENGLISH),
        ("translation_quickly", {}, None),
    ],
)
def test_the_languages_in_a_task(
    engine: FakeSeq2Seq, url: str, task: str, parameters: dict[str, str], language: int | None
) -> None:
    ask(url, f"/pipeline/{task}", {"inputs": "hi", "parameters": parameters})
    assert taken(engine).prompt_ids == ((START,) if language is None else (START, language))


def test_an_unknown_language_in_a_task(url: str) -> None:
    answer = httpx2.post(f"{url}/pipeline/translation_en_to_xx", json={"inputs": "hi"})
    assert answer.status_code == 400
    assert "tgt_lang 'xx' is not a language" in answer.json()["error"]["message"]


def test_summarization(engine: FakeSeq2Seq, url: str) -> None:
    assert InferenceClient(url).summarization("hi").summary_text == "hello"
    # The path names no task, so that the source gets no prefix.
    assert source_ids(taken(engine).inputs[0]) == [ENGLISH, *b"hi", EOS]
    output = InferenceClient(f"{url}/pipeline/summarization").summarization(
        "hi", generate_parameters={"max_new_tokens": 5, "min_length": 2}
    )
    assert output.summary_text == "hello"
    request = taken(engine)
    assert bytes(source_ids(request.inputs[0])[1:-1]) == b"summarize: hi"
    params = request.params
    assert (params.max_tokens, params.min_tokens, params.no_repeat_ngram_size) == (5, 1, 0)
    assert params.beams == BeamParams(width=2)


def test_text_generation(engine: FakeSeq2Seq, url: str) -> None:
    client = InferenceClient(url)
    assert client.text_generation("hi") == "hello"
    assert taken(engine).params.beams == BeamParams(width=4, length_penalty=2.0)
    output = client.text_generation("hi", details=True, max_new_tokens=9)
    assert output.details is not None
    assert (output.generated_text, output.details.generated_tokens) == ("hello", 6)
    assert output.details.finish_reason == "eos_token"
    assert [token.text for token in output.details.tokens[:2]] == ["h", "e"]
    sampled = client.text_generation("hi", temperature=0.5, top_p=0.9, seed=3, top_k=7)
    assert sampled == "hello"
    taken(engine)
    params = taken(engine).params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.9, 7, 3)
    assert params.beams is None


def test_text_generation_as_a_stream(engine: FakeSeq2Seq, url: str) -> None:
    client = InferenceClient(url)
    assert "".join(client.text_generation("hi", stream=True)) == "hello"
    chunks = list(client.text_generation("hi", stream=True, details=True))
    assert [chunk.index for chunk in chunks] == [1, 2, 3, 4, 5, 6]
    assert (chunks[-1].generated_text, chunks[-2].generated_text) == ("hello", None)
    assert chunks[-1].details is not None
    assert chunks[-1].details.finish_reason == "eos_token"
    # The source, with two special tokens, and the start token.
    assert chunks[-1].details.input_length == 5
    # The beams of the files cannot be streamed.
    assert taken(engine).params.beams is None


def test_events_of_a_stream_are_tgis_alone(engine: FakeSeq2Seq, url: str) -> None:
    """TGI's own client reads every event as JSON with a token."""
    body = {"inputs": "hi", "stream": True}
    with httpx2.stream("POST", url, json=body) as answer:
        lines = [line.removeprefix("data:") for line in answer.iter_lines() if line]
    assert [json.loads(line)["token"]["text"] for line in lines] == [*"hello", ""]


def test_what_langchain_sends_is_taken(engine: FakeSeq2Seq, url: str) -> None:
    """Its HuggingFaceEndpoint sends these parameters."""
    output = InferenceClient(url).text_generation(
        "hi",
        max_new_tokens=16,
        top_p=0.95,
        typical_p=0.95,
        temperature=0.8,
        return_full_text=False,
        stop=[],
        do_sample=False,
        watermark=False,
    )
    assert output == "hello"
    params = taken(engine).params
    assert params.beams == BeamParams(width=4, length_penalty=2.0)
    assert (params.temperature, params.max_tokens) == (0, 16)


def test_the_keys_of_an_answer_are_those_of_the_task(engine: FakeSeq2Seq, url: str) -> None:
    every = [dict.fromkeys(("translation_text", "summary_text", "generated_text"), "hello")]
    assert ask(url, "/", {"inputs": "hi"}) == every
    assert ask(url, f"/models/{NAME}", {"inputs": "hi"}) == every
    keys = {"text2text-generation": "generated_text", "text-generation": "generated_text"}
    keys |= {"translation": "translation_text", "summarization": "summary_text"}
    keys |= {"translation_en_to_de": "translation_text"}
    for task, key in keys.items():
        for path in (f"/pipeline/{task}", f"/pipeline/{task}/{NAME}"):
            assert ask(url, path, {"inputs": "hi"}) == [{key: "hello"}]
        path = f"/models/{NAME}/pipeline/{task}"
        assert ask(url, path, {"inputs": "hi"}) == [{key: "hello"}]


def test_several_sources_and_several_texts(engine: FakeSeq2Seq, url: str) -> None:
    text = {"generated_text": "hello"}
    path = "/pipeline/text2text-generation"
    assert ask(url, path, {"inputs": ["a", "b"]}) == [text, text]
    two = {"num_return_sequences": 2}
    assert ask(url, path, {"inputs": "a", "parameters": two}) == [text, text]
    assert ask(url, path, {"inputs": ["a"], "parameters": two}) == [[text, text]]
    assert taken(engine).params.n == 1


def test_defaults_are_those_of_the_files(engine: FakeSeq2Seq, url: str) -> None:
    params = params_of(engine, url, {})
    assert params.beams == BeamParams(width=4, length_penalty=2.0)
    assert (params.max_tokens, params.min_tokens, params.no_repeat_ngram_size) == (39, 2, 3)
    assert (params.forced_eos_id, params.logit_bias) == (EOS, ((BANNED, -math.inf),))
    assert params.temperature == 0


@pytest.mark.parametrize(
    ("parameters", "lengths"),
    [
        ({"max_length": 10}, (9, 2)),
        ({"max_new_tokens": 10}, (10, 2)),
        ({"max_length": 2}, (1, 1)),
        ({"min_new_tokens": 4}, (39, 4)),
        ({"min_length": 4, "max_new_tokens": 4}, (4, 3)),
        ({"max_length": 9, "max_new_tokens": 4}, (4, 2)),
    ],
)
def test_lengths_are_those_of_transformers(
    engine: FakeSeq2Seq, url: str, parameters: dict[str, int], lengths: tuple[int, int]
) -> None:
    """``max_length`` counts the start token, and forced tokens count as new ones."""
    params = params_of(engine, url, parameters)
    assert (params.max_tokens, params.min_tokens) == lengths


def test_a_forced_language_counts_as_new(engine: FakeSeq2Seq, url: str) -> None:
    params = params_of(engine, url, {"src_lang": "en", "tgt_lang": "de", "max_new_tokens": 5})
    assert params.max_tokens == 4


@pytest.mark.parametrize(
    ("parameters", "width"),
    [
        ({"num_beams": 1}, None),
        ({"num_beams": 3}, 3),
        ({"do_sample": True}, None),
        ({"temperature": 0.5}, None),
        ({"temperature": 0}, 4),
        ({"do_sample": False, "temperature": 0.5}, 4),
        ({"stop": ["x"]}, None),
    ],
)
def test_beams_of_the_files_are_left_out_where_they_cannot_be(
    engine: FakeSeq2Seq, url: str, parameters: dict[str, Any], width: int | None
) -> None:
    params = params_of(engine, url, parameters)
    assert (None if params.beams is None else params.beams.width) == width


def test_parameters_may_stand_beside_the_inputs(engine: FakeSeq2Seq, url: str) -> None:
    ask(url, "/", {"inputs": "hi", "num_beams": 3, "parameters": {"max_length": 7}})
    params = taken(engine).params
    assert params.beams is not None
    assert (params.beams.width, params.max_tokens) == (3, 6)


def test_spaces_are_cleaned_up(engine: FakeSeq2Seq, url: str) -> None:
    engine.script = write("it 's so , do n't !")
    (answer,) = ask(
        url, "/pipeline/summarization",
        {"inputs": "hi", "parameters": {"clean_up_tokenization_spaces": True}},
    )  # fmt: skip
    assert answer == {"summary_text": "it's so, don't!"}


@pytest.mark.parametrize(
    "parameters",
    [{"truncation": "longest_first"}, {"truncate": True}, {"truncation": "only_first"}],
)
def test_long_sources_are_cut(engine: FakeSeq2Seq, url: str, parameters: dict[str, Any]) -> None:
    ask(url, "/", {"inputs": "x" * 99, "parameters": parameters})
    assert source_ids(taken(engine).inputs[0]) == [ENGLISH, *b"x" * (MAX_SOURCE_LEN - 2), EOS]
    InferenceClient(url).text_generation("abcdef", truncate=4)
    assert source_ids(taken(engine).inputs[0]) == [ENGLISH, *b"ab", EOS]


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"inputs": ""}, "inputs", "The source must not be empty"),
    ({"inputs": []}, "inputs", "a text or a list of 1 to"),
    ({"inputs": 7}, "inputs", "a text or a list of 1 to"),
    ({"inputs": ["a", 7]}, "inputs", "a text or a list of 1 to"),
    ({"inputs": "x" * 99}, "inputs", "64 tokens. The source has 99"),
    ({"inputs": "a", "stream": True, "num_beams": 2}, "num_beams", "cannot be streamed"),
    ({"inputs": ["a", "b"], "stream": True}, "inputs", "must be a text"),
    ({"inputs": "a", "stream": True, "num_return_sequences": 2}, "num_return_sequences", "one"),
    *(
        ({"inputs": "a", "parameters": parameters}, param, message)
        for parameters, param, message in [
            ({"num_beams": 0}, "num_beams", ""),
            ({"num_beams": 65}, "num_beams", "64"),
            ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences", "2 beams"),
            ({"num_return_sequences": 5}, "num_return_sequences", "4 beams"),
            ({"num_beams": 1, "num_return_sequences": 2}, "num_return_sequences", "needs"),
            ({"num_return_sequences": 0}, "num_return_sequences", ""),
            ({"num_beams": 2, "temperature": 0.5}, "temperature", "beam search"),
            ({"num_beams": 2, "stop": ["x"]}, "stop", "beam search"),
            ({"src_lang": "en"}, "tgt_lang", "tgt_lang is missing"),
            ({"src_lang": "en", "tgt_lang": "fr"}, "tgt_lang", "which has de, en"),
            ({"min_length": 50, "max_length": 9}, "min_length", "exceeds"),
            ({"max_length": 0}, "max_length", ""),
            ({"min_length": 10**30}, "min_length", "exceeds"),
            ({"max_length": 10**30}, "max_new_tokens", "256 tokens"),
            ({"stop": "x" * 70_000, "num_beams": 1}, "stop", "65536 characters"),
            ({"stop": ["x"] * 65, "num_beams": 1}, "stop", "At most 64"),
            ({"stop": [""], "num_beams": 1}, "stop", "empty"),
            ({"max_new_tokens": 999}, "max_new_tokens", "256 tokens"),
            ({"truncation": "only_second"}, "truncation", "only_second"),
            ({"truncation": "yes"}, "truncation", ""),
            ({"truncate": 65}, "truncate", "from 1 to 64"),
            ({"typical_p": 0.9, "do_sample": True}, "typical_p", "is not supported"),
            ({"watermark": True}, "watermark", "is not supported"),
            ({"best_of": 2}, "best_of", "is not supported"),
            ({"return_full_text": True}, "return_full_text", "is not supported"),
            ({"diversity_penalty": 0.5}, "diversity_penalty", "is not supported"),
            ({"grammar": {"type": "x"}}, "grammar", "must have type"),
            ({"generate_parameters": {"num_beams": 65}}, "num_beams", "64"),
            ({"generate_parameters": 7}, "generate_parameters", ""),
            ({"length_penalty": 11}, "length_penalty", "between -10 and 10"),
            ({"early_stopping": "soon"}, "early_stopping", ""),
            ({"temperature": 3}, "temperature", ""),
        ]
    ),
]


@pytest.mark.parametrize(("body", "param", "message"), BAD)
def test_bad_input(
    engine: FakeSeq2Seq, url: str, body: dict[str, Any], param: str, message: str
) -> None:
    answer = httpx2.post(url, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].rpartition(".")[2] == param or param in error["message"]
    assert message in error["message"]
    assert engine.submitted.empty()


def test_beams_refuse_a_grammar_by_its_name() -> None:
    model = replace(seq2seq_model(), grammars=ByteVocabulary().compiler)
    grammar = {"type": "regex", "value": "a*"}
    body = {"inputs": "hi", "parameters": {"grammar": grammar, "num_beams": 2}}
    with serve_fake(FakeSeq2Seq(model)) as url:
        answer = httpx2.post(url, json=body)
    assert answer.status_code == 400, answer.text
    assert "This grammar cannot be combined with beam search." in answer.text


def test_a_full_queue_refuses_before_anything_is_encoded(engine: FakeSeq2Seq, url: str) -> None:
    engine.is_full = True
    try:
        # The empty source is not looked at.
        assert httpx2.post(url, json={"inputs": ""}).status_code == 429
    finally:
        engine.is_full = False


def test_a_refusal_reaches_the_client(url: str) -> None:
    with pytest.raises(HfHubHTTPError, match="src_lang 'xx' is not a language") as refusal:
        InferenceClient(url).translation("hi", src_lang="xx", tgt_lang="de")
    assert refusal.value.response is not None
    assert refusal.value.response.status_code == 400


def test_tasks_need_an_encoder_decoder(url: str) -> None:
    body = {"inputs": "hi"}
    assert httpx2.post(f"{url}/pipeline/translation/org/none", json=body).status_code == 404
    assert httpx2.post(f"{url}/models/org/none", json=body).status_code == 404
    answer = httpx2.post(f"{url}/pipeline/speaking", json=body).json()
    assert "translation, summarization" in answer["error"]["message"]
    with serve_fake(FakeSeq2Seq(decoder_model())) as other:
        answer = httpx2.post(f"{other}/pipeline/translation", json=body).json()
        assert "No encoder-decoder is served here" in answer["error"]["message"]
        for path in ("/models/org/decoder", "/pipeline/translation/org/decoder"):
            answer = httpx2.post(other + path, json=body).json()
            assert "org/decoder is not an encoder-decoder" in answer["error"]["message"]


def test_pooling_models_come_first_where_the_body_names_no_task() -> None:
    engine = FakeSeq2Seq(decoder_model(), seq2seq_model())
    engine.pooling = FakeEncoders(make_encoder("org/encoder", tasks=("embed",)))
    with serve_fake(engine) as url:
        (vector,) = ask(url, "/", {"inputs": "hi"})
        assert isinstance(vector, list)
        # These parameters are those of tasks that generate.
        for more in ({"parameters": {"num_beams": 2}}, {"src_lang": "en", "tgt_lang": "de"}):
            (answer,) = ask(url, "/", {"inputs": "hi"} | more)
            assert answer["summary_text"] == "hello"
        assert ask(url, f"/models/{NAME}", {"inputs": "hi"})[0]["generated_text"] == "hello"
        output = InferenceClient(url).translation("hi", src_lang="en", tgt_lang="de")
        assert output.translation_text == "hello"
