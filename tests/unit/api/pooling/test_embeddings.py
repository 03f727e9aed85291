"""Embeddings and pooling: how vectors are asked for and written, over encoders without a model."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from mlx_parallm.api.pooling import answer as encoder_answer
from mlx_parallm.api.pooling.vectors.arrays import activated, as_bytes
from mlx_parallm.types.pooling import PoolingInput, Task
from tests.encoder_requests import post, refused_field
from tests.fake_encoders import FakeEncoders, computed, make_encoder

PROMPTS = {"query": "w10", "passage": "w11 ", "classification": "w12 ", "": "w13 "}
WIRE = {"float32": "f4", "float16": "f2"}


def embedder(**changes: Any) -> FakeEncoders:
    return FakeEncoders(make_encoder("embedder", **changes))


def vector(ids: tuple[int, ...], task: Task = "embed", served: FakeEncoders | None = None) -> Any:
    return computed(PoolingInput(ids, task), (served or embedder()).models()[0].info)


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


async def vectors(served: FakeEncoders, **body: Any) -> np.ndarray:
    answer = await post(served, "/v1/embeddings", body)
    assert answer.status_code == 200, answer.text
    return np.array([entry["embedding"] for entry in answer.json()["data"]])


async def ids_read(served: FakeEncoders, **body: Any) -> list[tuple[int, ...]]:
    answer = await post(served, "/v1/embeddings", body)
    assert answer.status_code == 200, answer.text
    return [read.token_ids for read in served.thread.requests[-1].inputs]


async def test_vectors_are_divided_by_their_lengths_as_asked() -> None:
    raw = vector((2, 5, 3))
    for normalizes, body, wanted in [
        (True, {}, unit(raw)),
        (False, {}, raw),
        (True, {"use_activation": False}, raw),
        (False, {"normalize": True}, unit(raw)),
    ]:
        rows = await vectors(embedder(normalizes=normalizes), input="w5", **body)
        np.testing.assert_allclose(rows[0], wanted, rtol=1e-6)


async def test_shorter_vectors_are_cut_before_they_are_divided() -> None:
    served = embedder(shorter_dims=(2,))
    rows = await vectors(served, input="w5", dimensions=2)
    np.testing.assert_allclose(rows[0], unit(vector((2, 5, 3))[:2]), rtol=1e-6)
    refused = await post(served, "/v1/embeddings", {"input": "w5", "dimensions": 3})
    assert refused_field(refused) == (400, "dimensions")


@pytest.mark.parametrize(
    ("body", "first"),
    [
        ({}, 5),
        ({"prompt_name": "query"}, 1),
        ({"prompt_name": ""}, 13),
        ({"prompt": "w20 "}, 20),
        ({"prompt": ""}, 5),
        ({"input_type": "query"}, 1),
        ({"input_type": "search_query"}, 1),
        ({"task": "retrieval.query"}, 1),
        ({"input_type": "document"}, 11),
        ({"input_type": "passage"}, 11),
        ({"input_type": "classification"}, 12),
    ],
)
async def test_the_prompt_that_is_asked_for_comes_first(body: dict[str, Any], first: int) -> None:
    # The prompt of queries has no space at its end: with it "w5" becomes one word "w10w5".
    served = embedder(prompts=PROMPTS)
    for ids in await ids_read(served, input=["w5", "w5 w6"], **body):
        assert ids[1] == first


async def test_a_default_prompt_is_for_texts_that_ask_for_none() -> None:
    served = embedder(prompts={"passage": "w11 ", "other": "w12 "}, default_prompt="other")
    assert await ids_read(served, input="w5") == [(2, 12, 5, 3)]
    assert await ids_read(served, input="w5", input_type="query") == [(2, 12, 5, 3)]
    assert await ids_read(served, input="w5", input_type="document") == [(2, 11, 5, 3)]
    assert await ids_read(served, input=[5]) == [(5,)]


async def test_a_model_without_prompts_takes_the_types_that_are_known() -> None:
    for kind in ("search_query", "search_document", "classification", "clustering"):
        assert await ids_read(embedder(), input="w5", input_type=kind) == [(2, 5, 3)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt_name": "none"}, "prompt_name"),
        ({"input_type": "none"}, "input_type"),
        ({"input_type": "clustering"}, "input_type"),
        ({"input_type": "query", "prompt": "w5 "}, "input_type"),
        ({"input": [5], "prompt": "w5 "}, "prompt"),
        ({"input": None, "prompt_name": "query"}, "prompt_name"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"embed_dtype": "fp8"}, "embed_dtype"),
        ({"endianness": "middle"}, "endianness"),
        ({"input": ["w5"] * 300, "encoding_format": "bytes"}, "encoding_format"),
        ({"input": ["w5"] * 10_000}, "input"),
        ({"input": "w5 " * 300_000}, "input"),
        ({"dimensions": "2"}, "dimensions"),
        ({"model": 5}, "model"),
    ],
)
async def test_bad_requests_name_the_field(body: dict[str, Any], param: str) -> None:
    served = embedder(prompts=PROMPTS)
    answer = await post(served, "/v1/embeddings", {"input": "w5"} | body)
    assert refused_field(answer) == (400, param), answer.text
    assert served.thread.requests == []


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("endianness", ["native", "little", "big"])
async def test_numbers_come_as_bytes(dtype: str, endianness: str) -> None:
    served = embedder(dims=6)
    body = {"input": ["w5", "w6"], "embed_dtype": dtype, "endianness": endianness}
    exact = await vectors(served, **body)

    def read(raw: bytes) -> np.ndarray:
        order = ">" if endianness == "big" else "<"
        if dtype == "bfloat16":
            upper = np.frombuffer(raw, order + "u2").astype(np.uint32) << 16
            return upper.view(np.float32)
        return np.frombuffer(raw, order + WIRE[dtype])

    rounding = {"float32": 0, "float16": 2**-11, "bfloat16": 2**-8}[dtype] + 1e-7
    answer = await post(served, "/v1/embeddings", body | {"encoding_format": "base64"})
    for entry, wanted in zip(answer.json()["data"], exact, strict=True):
        np.testing.assert_allclose(
            read(base64.b64decode(entry["embedding"])), wanted, rtol=rounding
        )
    answer = await post(served, "/v1/embeddings", body | {"encoding_format": "bytes"})
    about = json.loads(answer.headers["metadata"])
    assert about["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    for entry, wanted in zip(about["data"], exact, strict=True):
        assert (entry["shape"], entry["embed_dtype"], entry["endianness"]) == (
            [6],
            dtype,
            endianness,
        )
        raw = answer.content[entry["start"] : entry["end"]]
        np.testing.assert_allclose(read(raw), wanted, rtol=rounding)
    bare = await post(served, "/v1/embeddings", body | {"encoding_format": "bytes_only"})
    assert bare.content == answer.content
    assert "metadata" not in bare.headers


def test_bfloat16_is_the_nearest_with_ties_to_even() -> None:
    values = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-7], np.float32)
    upper = np.frombuffer(as_bytes(values, "bfloat16"), "<u2").astype(np.uint32) << 16
    wanted = [1, 1, 1 + 2**-6, 1 + 2**-7, -1 - 2**-7]
    np.testing.assert_array_equal(upper.view(np.float32), wanted)


async def test_clients_are_told_what_was_not_read() -> None:
    answer = await post(embedder(), "/v1/embeddings", {"input": "w5", "task_type": "a"})
    assert answer.headers["x-ignored-fields"] == "task_type"


async def test_late_chunking_is_refused_and_not_dropped() -> None:
    body = {"input": ["w5", "w6"], "late_chunking": True}
    answer = await post(embedder(), "/v1/embeddings", body)
    assert refused_field(answer) == (400, "late_chunking")
    answer = await post(embedder(), "/v1/embeddings", body | {"late_chunking": False})
    assert answer.status_code == 200


async def test_pooling_does_what_the_model_was_made_for() -> None:
    for tasks, wanted in [
        (("embed", "token_embed"), unit(vector((2, 5, 3)))),
        (("mlm", "sparse", "embed", "token_embed"), unit(vector((2, 5, 3)))),
        (("token_embed",), unit(vector((2, 5, 3), "token_embed"))),
    ]:
        answer = (await post(embedder(tasks=tasks), "/pooling", {"input": "w5"})).json()
        (entry,) = answer["data"]
        assert (entry["object"], entry["index"], answer["object"]) == ("pooling", 0, "list")
        assert answer["id"].startswith("pool-")
        np.testing.assert_allclose(entry["data"], wanted, rtol=1e-5)


async def test_pooling_gives_labels_of_texts_and_of_tokens() -> None:
    served = embedder(tasks=("classify", "token_classify"), labels=("a", "b", "c"))
    for task in ("classify", "token_classify"):
        raw = vector((2, 5, 6, 3), task, served)
        body: dict[str, Any] = {"input": "w5 w6", "task": task}
        answer = (await post(served, "/pooling", body)).json()
        np.testing.assert_allclose(answer["data"][0]["data"], activated(raw, None), rtol=1e-5)
        body |= {"use_activation": False, "encoding_format": "base64"}
        data = (await post(served, "/pooling", body)).json()["data"][0]["data"]
        array = np.frombuffer(base64.b64decode(data), "<f4").reshape(raw.shape)
        np.testing.assert_array_equal(array, raw)


async def test_multi_vectors_of_several_texts_come_as_bytes() -> None:
    served = embedder()
    body = {"input": ["w5", "w5 w6"], "task": "token_embed", "encoding_format": "bytes"}
    answer = await post(served, "/pooling", body)
    data = json.loads(answer.headers["metadata"])["data"]
    assert [entry["shape"] for entry in data] == [[3, 4], [4, 4]]
    raw = answer.content[data[1]["start"] : data[1]["end"]]
    rows = np.frombuffer(raw, "<f4").reshape(4, 4)
    np.testing.assert_allclose(rows, unit(vector((2, 5, 6, 3), "token_embed")), rtol=1e-5)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"task": "classify"}, "model"),
        ({"task": "mlm"}, "task"),
        ({"task": "token_embed", "dimensions": 2}, "dimensions"),
        ({"dimensions": 3}, "dimensions"),
        ({"data": {"image": "a"}}, "data"),
        ({"input": None}, "input"),
    ],
)
async def test_pooling_refuses_what_it_cannot_do(body: dict[str, Any], param: str) -> None:
    served = embedder(shorter_dims=(2,))
    answer = await post(served, "/pooling", {"input": "w5"} | body)
    assert refused_field(answer) == (400, param), answer.text


async def test_an_answer_that_no_client_could_read_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoder_answer, "MAX_NUMBERS", 23)
    body = {"input": ["w5", "w6"], "task": "token_embed"}
    answer = await post(embedder(), "/pooling", body)
    assert refused_field(answer) == (400, "input")
    answer = await post(embedder(dims=3), "/pooling", body)
    assert answer.status_code == 200
