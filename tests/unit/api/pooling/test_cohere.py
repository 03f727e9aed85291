"""Cohere's embeddings: types of numbers, cutting, prompts and errors, without a model."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from tests.encoder_requests import post
from tests.fake_encoders import FakeEncoders, make_encoder

PROMPTS = {"query": "w10", "classification": "w12 "}


def embedder(**changes: Any) -> FakeEncoders:
    return FakeEncoders(make_encoder("embedder", **changes))


async def answer_to(served: FakeEncoders, **body: Any) -> dict[str, Any]:
    answer = await post(served, "/v2/embed", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def ids_read(served: FakeEncoders, **body: Any) -> list[tuple[int, ...]]:
    await answer_to(served, **body)
    return [read.token_ids for read in served.thread.requests[-1].inputs]


async def test_every_type_is_the_same_vector() -> None:
    types = ["float", "int8", "uint8", "base64"]
    answer = await answer_to(embedder(), texts=["w5", "w6 w7"], embedding_types=types)
    assert answer["texts"] == ["w5", "w6 w7"]
    assert answer["meta"]["billed_units"]["input_tokens"] == 7
    assert list(answer["embeddings"]) == types
    for number, row in enumerate(answer["embeddings"]["float"]):
        vector = np.array(row)
        kept = {name: answer["embeddings"][name][number] for name in types}
        np.testing.assert_allclose(
            np.frombuffer(base64.b64decode(kept["base64"]), "<f4"), vector, rtol=1e-6
        )
        whole = np.rint(vector * 127 / np.abs(vector).max())
        assert kept["int8"] == whole.tolist()
        assert kept["uint8"] == (whole + 128).tolist()
        assert max(map(abs, kept["int8"])) == 127


@pytest.mark.parametrize("dims", [8, 16])
async def test_signs_are_packed(dims: int) -> None:
    types = ["float", "binary", "ubinary"]
    answer = await answer_to(embedder(dims=dims), texts=["w5"], embedding_types=types)
    vector = answer["embeddings"]["float"][0]
    bits = "".join("1" if value > 0 else "0" for value in vector)
    packed = [int(bits[start : start + 8], 2) for start in range(0, dims, 8)]
    assert answer["embeddings"]["ubinary"] == [packed]
    assert answer["embeddings"]["binary"] == [[value - 128 for value in packed]]


async def test_inputs_of_parts_are_texts() -> None:
    part = {"type": "text", "text": "w5"}
    answer = await answer_to(embedder(), inputs=[{"content": [part]}])
    assert "texts" not in answer
    assert answer["embeddings"] == (await answer_to(embedder(), texts=["w5"]))["embeddings"]


async def test_long_texts_are_cut_at_the_end_that_is_named() -> None:
    text = "w5 w6 w7 w8"
    (whole,) = await ids_read(embedder(), texts=[text])
    for truncate, kept in (("END", whole[:4]), ("START", whole[-4:])):
        ids = await ids_read(embedder(), texts=[text], truncate=truncate, max_tokens=4)
        assert ids == [kept]


async def test_a_type_of_input_is_the_models_prompt() -> None:
    served = embedder(prompts=PROMPTS)
    plain = await ids_read(served, texts=["w10w5"])
    assert await ids_read(served, texts=["w5"], input_type="search_query") == plain


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ({}, "exactly one"),
        ({"texts": ["w5"], "images": ["data:"]}, "exactly one"),
        ({"images": ["data:image/png;base64,"]}, "images"),
        ({"inputs": [{"content": [{"type": "image_url"}]}]}, "inputs[0].content[0]"),
        ({"inputs": [{"content": [{"type": "text"}]}]}, "inputs[0].content[0].text"),
        ({"texts": ["w5 w6 w7"], "truncate": "NONE", "max_tokens": 2}, "max_tokens"),
        ({"texts": ["w5"], "embedding_types": ["int4"]}, "embedding_types"),
        ({"texts": ["w5"], "output_dimension": 10**6}, "output_dimension"),
        ({"texts": ["w5"], "input_type": "poem"}, "poem"),
        ({"texts": []}, "texts"),
    ],
)
async def test_errors_have_coheres_form(body: dict[str, Any], what: str) -> None:
    answer = await post(embedder(), "/v2/embed", body)
    assert answer.status_code in (400, 422)
    assert set(answer.json()) == {"message", "id"}
    assert what in answer.json()["message"]


async def test_signs_need_a_multiple_of_eight() -> None:
    body = {"texts": ["w5"], "embedding_types": ["ubinary"], "output_dimension": 3}
    answer = await post(embedder(dims=8, shorter_dims=None), "/v2/embed", body)
    assert answer.status_code == 400
    assert "multiple of 8" in answer.json()["message"]
