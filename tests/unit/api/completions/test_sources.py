"""``/v1/completions`` of encoder-decoders: the prompt is the source."""

from __future__ import annotations

import json
import math
import queue
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from openai import OpenAI

from tests.fake_engine import serve_fake
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

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeSeq2Seq, str]]:
    engine = FakeSeq2Seq()
    with serve_fake(engine) as url:
        yield engine, url


@pytest.fixture
def engine(served: tuple[FakeSeq2Seq, str]) -> FakeSeq2Seq:
    served[0].submitted = queue.Queue()
    return served[0]


@pytest.fixture
def url(served: tuple[FakeSeq2Seq, str]) -> str:
    return served[1]


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx2.post(url + PATH, json={"model": NAME} | body)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def test_a_text_is_the_source(engine: FakeSeq2Seq, url: str) -> None:
    answer = ask(url, {"prompt": "hi", "src_lang": "en", "tgt_lang": "de", "temperature": 0})
    request = taken(engine)
    (source,) = request.inputs
    assert source_ids(source) == [ENGLISH, *b"hi", EOS]
    assert request.prompt_ids == (START, GERMAN)
    assert answer["choices"][0]["text"] == "hello"
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["total_tokens"]) == (6, 6 + usage["completion_tokens"])


def test_lengths_and_forced_tokens_are_those_of_the_files(engine: FakeSeq2Seq, url: str) -> None:
    ask(url, {"prompt": "hi"})
    params = taken(engine).params
    # 40 and 3 tokens with the start token, and no beams.
    assert (params.max_tokens, params.min_tokens, params.forced_eos_id) == (39, 2, EOS)
    assert (params.beams, params.no_repeat_ngram_size) == (None, 0)
    assert params.logit_bias == ((BANNED, -math.inf),)
    ask(url, {"prompt": "hi", "max_tokens": 1})
    params = taken(engine).params
    assert (params.max_tokens, params.min_tokens) == (1, 1)
    ask(url, {"prompt": "hi", "min_tokens": 0, "ignore_eos": True, "logit_bias": {"7": 1}})
    params = taken(engine).params
    assert (params.max_tokens, params.min_tokens, params.forced_eos_id) == (39, 0, None)
    assert params.logit_bias == ((7, 1), (BANNED, -math.inf))


def test_tokens_are_taken_as_they_are(engine: FakeSeq2Seq, url: str) -> None:
    answer = ask(url, {"prompt": [[5, 6], [7]], "n": 2})
    assert [source_ids(taken(engine).inputs[0]) for _ in range(2)] == [[5, 6], [7]]
    assert len(answer["choices"]) == 4
    assert answer["usage"]["prompt_tokens"] == 2 + 1 + 2


@pytest.mark.parametrize(
    ("decoder", "ids"),
    [
        ({"decoder_prompt": "ab"}, (START, GERMAN, *b"ab")),
        ({"decoder_prompt": ""}, (START, GERMAN)),
        ({"decoder_input_ids": [START]}, (START, GERMAN)),
        ({"decoder_input_ids": [START, GERMAN, 9]}, (START, GERMAN, 9)),
        ({"decoder_input_ids": [[START, GERMAN, 8]]}, (START, GERMAN, 8)),
        ({"decoder_prompt": ["c"]}, (START, GERMAN, *b"c")),
    ],
)
def test_what_the_decoder_goes_on_from(
    engine: FakeSeq2Seq, url: str, decoder: dict[str, Any], ids: tuple[int, ...]
) -> None:
    ask(url, {"prompt": "hi", "src_lang": "en", "tgt_lang": "de"} | decoder)
    assert taken(engine).prompt_ids == ids


def test_each_source_has_its_own_decoder_prompt(engine: FakeSeq2Seq, url: str) -> None:
    ask(url, {"prompt": ["a", "b"], "decoder_prompt": ["x", "y"]})
    requests = [taken(engine), taken(engine)]
    assert [request.prompt_ids for request in requests] == [(START, *b"x"), (START, *b"y")]
    ask(url, {"prompt": ["a", "b"], "decoder_input_ids": [START, 7]})
    assert [taken(engine).prompt_ids for _ in range(2)] == [(START, 7), (START, 7)]


def test_pairs_are_scored(engine: FakeSeq2Seq, url: str) -> None:
    body = {"prompt": "hi", "decoder_prompt": "ab", "max_tokens": 0, "echo": True, "logprobs": 0}
    (choice,) = ask(url, body)["choices"]
    assert taken(engine).params.max_tokens == 0
    assert choice["text"] == "ab"
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.25]
    (choice,) = ask(url, {"prompt": "hi", "prompt_logprobs": 0, "return_token_ids": True})[
        "choices"
    ]
    assert choice["prompt_token_ids"] == [START]
    assert choice["prompt_logprobs"] == [None]


@pytest.mark.parametrize(("side", "kept"), [(None, b"abcd"), ("right", b"abcd"), ("left", b"yzab")])
def test_long_sources_are_cut_between_their_special_tokens(
    engine: FakeSeq2Seq, url: str, side: str | None, kept: bytes
) -> None:
    text = "abcdefghijklmnopqrstuvwxyzab"
    body = {"prompt": text, "truncate_prompt_tokens": 6, "src_lang": "en", "tgt_lang": "de"}
    ask(url, body | ({} if side is None else {"truncation_side": side}))
    assert source_ids(taken(engine).inputs[0]) == [ENGLISH, *kept, EOS]
    ask(url, {"prompt": "x" * 999, "truncate_prompt_tokens": -1})
    assert len(source_ids(taken(engine).inputs[0])) == MAX_SOURCE_LEN


def test_streams(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="-")
    with client.completions.create(
        model=NAME, prompt="hi", stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "hello"
    assert chunks[-1].usage is not None
    # Both sides, with a token of the language and an end token.
    assert chunks[-1].usage.prompt_tokens == 5


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", "must not be empty"),
    ({"prompt": []}, "prompt", "must not be empty"),
    ({"prompt": ["a", ""]}, "prompt", "must not be empty"),
    ({}, "prompt", "The prompt is missing"),
    ({"prompt": [5, 257]}, "prompt", "257; this model's ids are 0 to 256"),
    ({"prompt": [-1]}, "prompt", "-1; this model's ids"),
    ({"prompt": "x" * 63}, "prompt", "64 tokens. The source has 65"),
    ({"prompt": [5] * 65}, "prompt", "64 tokens. The source has 65"),
    ({"prompt": "a", "truncate_prompt_tokens": 65}, "truncate_prompt_tokens", "from 1 to 64"),
    ({"prompt": "a", "src_lang": "en"}, "tgt_lang", "tgt_lang is missing"),
    ({"prompt": "a", "tgt_lang": "de"}, "src_lang", "src_lang is missing"),
    ({"prompt": "a", "src_lang": "xx", "tgt_lang": "de"}, "src_lang", "which has de, en"),
    ({"prompt": "a", "src_lang": "en", "tgt_lang": "xx"}, "tgt_lang", "which has de, en"),
    ({"prompt": "a", "decoder_input_ids": [2]}, "decoder_input_ids", r"must begin with \[1\]"),
    ({"prompt": "a", "decoder_input_ids": []}, "decoder_input_ids", r"must begin with \[1\]"),
    ({"prompt": "a", "decoder_input_ids": [1, 999]}, "decoder_input_ids", "999"),
    (
        {"prompt": "a", "decoder_input_ids": [1], "decoder_prompt": "x"},
        "decoder_input_ids",
        "Give decoder_prompt or decoder_input_ids",
    ),
    ({"prompt": "a", "decoder_prompt": ["x", "y"]}, "decoder_prompt", "2 entries for 1 prompt"),
    ({"prompt": "a", "decoder_prompt": "x" * 300}, "decoder_prompt", "256 tokens"),
    ({"prompt": "a", "max_tokens": 300}, "max_tokens", "256 tokens"),
    ({"prompt": "a", "suffix": "x"}, "suffix", "suffix is not for an encoder-decoder"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds", "is not for an encoder-decoder"),
    ({"prompt": "a", "images": ["x"]}, "images", "images is not supported"),
    ({"prompt": "a", "multi_modal_data": {"image": "x"}}, "multi_modal_data", "not supported"),
    ({"prompt": 7}, "prompt", ""),
    ({"prompt": "a", "src_lang": 7}, "src_lang", ""),
]


@pytest.mark.parametrize(("body", "param", "message"), BAD)
def test_bad_input(
    engine: FakeSeq2Seq, url: str, body: dict[str, Any], param: str, message: str
) -> None:
    answer = httpx2.post(url + PATH, json={"model": NAME} | body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert message.replace("\\", "") in error["message"]
    assert engine.submitted.empty()


def test_a_source_may_have_a_vocabulary_of_its_own() -> None:
    engine = FakeSeq2Seq(seq2seq_model(source_vocab_size=300))
    with serve_fake(engine) as url:
        ask(url, {"prompt": [299]})
        assert source_ids(taken(engine).inputs[0]) == [299]
        body = {"model": NAME, "prompt": [300]}
        error = httpx2.post(url + PATH, json=body).json()["error"]
    assert "300; this model's ids are 0 to 299" in error["message"]


def test_languages_to_a_model_without_are_refused() -> None:
    with serve_fake(FakeSeq2Seq(seq2seq_model(has_languages=False))) as url:
        body = {"model": NAME, "prompt": "a", "src_lang": "en", "tgt_lang": "de"}
        error = httpx2.post(url + PATH, json=body).json()["error"]
    assert (error["param"], error["type"]) == ("src_lang", "invalid_request_error")


@pytest.mark.parametrize("field", ["decoder_prompt", "decoder_input_ids", "src_lang", "tgt_lang"])
def test_models_without_an_encoder_refuse_these_fields(field: str) -> None:
    engine = FakeSeq2Seq(decoder_model())
    with serve_fake(engine) as url:
        value = [1] if field == "decoder_input_ids" else "en"
        body = {"prompt": "a", field: value}
        error = httpx2.post(url + PATH, json=body).json()["error"]
    assert error["param"] == field
    assert f"{field} is not for a model without an encoder" in error["message"]
    assert engine.submitted.empty()


def test_json_of_a_banned_token_can_be_written(url: str) -> None:
    """Its bias is infinite, which JSON has no number for."""
    body = {"model": NAME, "prompt": "a", "stream": True}
    with httpx2.stream("POST", url + PATH, json=body) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    assert all(json.loads(line.removeprefix("data: ")) for line in lines)
