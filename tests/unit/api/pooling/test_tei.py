"""The routes of text-embeddings-inference, over encoders without a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlx_parallm.api.pooling import encoded as encoding
from mlx_parallm.api.pooling.vectors.arrays import activated
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.pooling import PoolingInput, Task
from tests.encoder_requests import fetch, post, refused_field
from tests.fake_encoders import FakeEncoders, computed, make_encoder

LABELS = ("calm", "angry", "sad")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
INFO_FIELDS = {
    *("model_id", "model_sha", "model_dtype", "served_model_name", "model_type"),
    *("max_concurrent_requests", "max_input_length", "max_batch_tokens", "max_batch_requests"),
    *("max_client_batch_size", "auto_truncate", "tokenization_workers", "version", "sha"),
    "docker_label",
}


def embedder(**changes: Any) -> FakeEncoders:
    facts = {"tasks": ("embed", "token_embed", "sparse"), "shorter_dims": (2,)}
    return FakeEncoders(make_encoder(**facts | {"normalizes": False} | changes))


def classifier(**changes: Any) -> FakeEncoders:
    return FakeEncoders(make_encoder(**{"tasks": ("classify",), "labels": LABELS} | changes))


def result(task: Task, *ids: int, second_at: int | None = None) -> np.ndarray:
    info = (classifier() if task == "classify" else embedder()).models()[0].info
    return computed(PoolingInput(ids, task, second_at), info)


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


async def answer(served: FakeEncoders, path: str, **body: Any) -> Any:
    response = await post(served, path, body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_embed_gives_a_list_of_vectors() -> None:
    raw = result("embed", 2, 5, 3)
    for body, wanted in [
        ({}, unit(raw)),
        ({"normalize": False}, raw),
        ({"dimensions": 2}, unit(raw[:2])),
    ]:
        for inputs in ("w5", ["w5"], [[2, 5, 3]], [2, 5, 3]):
            vectors = await answer(embedder(), "/embed", inputs=inputs, **body)
            np.testing.assert_allclose(vectors, [wanted], rtol=1e-6)


async def test_what_is_too_long_is_cut_unless_that_is_refused() -> None:
    served = embedder()
    text = " ".join(f"w{number}" for number in range(5, 40))
    await answer(served, "/embed", inputs=text)
    await answer(served, "/embed", inputs=text, truncate=True, truncation_direction="Left")
    left, right = (request.inputs[0].token_ids for request in reversed(served.thread.requests))
    assert (len(left), left[-1]) == (16, 3)
    assert right == (2, *range(5, 20))
    refused = await post(served, "/embed", {"inputs": text, "truncate": False})
    assert refused_field(refused) == (400, "inputs")
    assert refused.json()["error"]["code"] == "context_length_exceeded"


async def test_a_prompt_is_asked_for_by_its_name() -> None:
    served = embedder(prompts={"query": "w10 ", "other": "w11 "}, default_prompt="other")
    for body in ({}, {"prompt_name": "query"}):
        await answer(served, "/embed_all", inputs="w5", **body)
    assert [request.inputs[0].token_ids for request in served.thread.requests] == [
        (2, 11, 5, 3),
        (2, 10, 5, 3),
    ]


async def test_embed_all_gives_every_token_its_vector() -> None:
    vectors = await answer(embedder(normalizes=True), "/embed_all", inputs=["w5", "w6 w7"])
    np.testing.assert_allclose(vectors[0], result("token_embed", 2, 5, 3), rtol=1e-6)
    np.testing.assert_allclose(vectors[1], result("token_embed", 2, 6, 7, 3), rtol=1e-6)


async def test_embed_sparse_gives_the_words_with_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two results at a time.
    monkeypatch.setattr(encoding, "PART_NUMBERS", 250)
    served = embedder()
    texts = [f"w{number}" for number in range(5, 10)]
    weights = await answer(served, "/embed_sparse", inputs=texts)
    assert [len(request.inputs) for request in served.thread.requests] == [2, 2, 1]
    for number, values in zip(range(5, 10), weights, strict=True):
        wanted = result("sparse", 2, number, 3)
        assert [entry["index"] for entry in values] == np.flatnonzero(wanted).tolist()
        np.testing.assert_allclose(
            [entry["value"] for entry in values], wanted[wanted > 0], rtol=1e-6
        )


async def test_predict_sorts_labels_of_texts_and_pairs() -> None:
    pair = result("classify", 2, 5, 3, 6, 7, 3, second_at=3)
    text = result("classify", 2, 8, 3)
    batch = await answer(classifier(), "/predict", inputs=[["w5", "w6 w7"], ["w8"]])
    for labels, raw in [
        (await answer(classifier(), "/predict", inputs="w8"), text),
        (await answer(classifier(), "/predict", inputs=["w8"]), text),
        (await answer(classifier(), "/predict", inputs=["w5", "w6 w7"]), pair),
        (batch[0], pair),
        (batch[1], text),
    ]:
        wanted = activated(raw, None)
        order = np.argsort(-wanted)
        assert [label["label"] for label in labels] == [LABELS[place] for place in order]
        np.testing.assert_allclose([label["score"] for label in labels], wanted[order], rtol=1e-6)
    raw_scores = await answer(classifier(), "/predict", inputs="w8", raw_scores=True)
    np.testing.assert_allclose([label["score"] for label in raw_scores], -np.sort(-text), rtol=1e-6)


async def test_labels_that_do_not_exclude_each_other_have_a_probability_each() -> None:
    served = classifier(problem_type="multi_label_classification")
    labels = await answer(served, "/predict", inputs="w8")
    wanted = activated(result("classify", 2, 8, 3), "multi_label_classification")
    np.testing.assert_allclose([label["score"] for label in labels], -np.sort(-wanted), rtol=1e-6)


async def test_similarity_is_the_cosine() -> None:
    inputs = {"source_sentence": "w5", "sentences": ["w6", "w5"]}
    cosines = await answer(embedder(), "/similarity", inputs=inputs)
    wanted = unit(result("embed", 2, 5, 3)) @ unit(result("embed", 2, 6, 3))
    np.testing.assert_allclose(cosines, np.array([wanted, 1]), rtol=1e-5)


async def test_ids_are_turned_into_texts() -> None:
    assert await answer(embedder(), "/decode", ids=[2, 5, 3]) == ["w5"]
    body = {"ids": [[2, 5, 3], [6]], "skip_special_tokens": False}
    assert await answer(embedder(), "/decode", **body) == ["w2 w5 w3", "w6"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/embed", {}, "inputs"),
        ("/embed", {"inputs": []}, "inputs"),
        ("/embed", {"inputs": ["w5", ""]}, "inputs"),
        ("/embed", {"inputs": ["w5"] * 10_000}, "inputs"),
        ("/embed", {"inputs": [[100]]}, "inputs"),
        ("/embed", {"inputs": "w5", "truncate": "yes"}, "truncate"),
        ("/embed", {"inputs": "w5", "truncation_direction": "up"}, "truncation_direction"),
        ("/embed", {"inputs": "w5", "prompt_name": "none"}, "prompt_name"),
        ("/embed", {"inputs": [5], "prompt_name": "none"}, "prompt_name"),
        ("/embed", {"inputs": "w5", "dimensions": 3}, "dimensions"),
        ("/embed_all", {"inputs": {"a": 1}}, "inputs"),
        ("/embed_sparse", {"inputs": [1.5]}, "inputs"),
        ("/predict", {"inputs": "w5"}, "model"),
        ("/predict", {"inputs": []}, "inputs"),
        ("/predict", {"inputs": ["w5", "w6", "w7"]}, "inputs"),
        ("/predict", {"inputs": [["w5", ""]]}, "inputs"),
        ("/predict", {"inputs": [["w5"], "w6"]}, "inputs"),
        ("/similarity", {"inputs": "w5"}, "inputs"),
        ("/similarity", {"inputs": {"source_sentence": "w5", "sentences": []}}, "inputs"),
        ("/decode", {"ids": []}, "ids"),
        ("/decode", {"ids": [100]}, "ids"),
        ("/decode", {"ids": [[5], [-1]]}, "ids"),
        ("/decode", {"ids": [5, [5]]}, "ids"),
    ],
)
async def test_bad_requests_name_the_field(path: str, body: dict[str, Any], param: str) -> None:
    served = embedder()
    response = await post(served, path, body)
    assert refused_field(response) == (400, param), response.text
    assert served.thread.requests == []


async def test_a_pair_is_cut_at_its_end_only() -> None:
    body = {"inputs": ["w5", "w6"], "truncation_direction": "left"}
    response = await post(classifier(), "/predict", body)
    assert refused_field(response) == (400, "truncation_direction")


@pytest.mark.parametrize(
    ("changes", "model_type"),
    [
        ({"poolings": ("last",)}, {"embedding": {"pooling": "last_token"}}),
        ({"poolings": ("cls", "mean")}, {"embedding": {"pooling": "cls+mean"}}),
        ({"tasks": ("mlm", "sparse")}, {"embedding": {"pooling": "splade"}}),
        (
            {"tasks": ("classify",), "labels": ("fits",)},
            {"reranker": {"id2label": {"0": "fits"}, "label2id": {"fits": 0}}},
        ),
        (
            {"tasks": ("token_classify",), "labels": ("O", "B")},
            {"classifier": {"id2label": {"0": "O", "1": "B"}, "label2id": {"O": 0, "B": 1}}},
        ),
    ],
)
async def test_info_tells_what_a_model_is(changes: Any, model_type: Any) -> None:
    served = FakeEncoders(make_encoder("first"), make_encoder("second", "other", **changes))
    facts = (await fetch(served, "/info?model=other")).json()
    assert facts["model_type"] == model_type
    assert facts["served_model_name"] == "second"
    assert (facts["max_input_length"], facts["max_batch_tokens"]) == (16, 64)
    assert facts["max_concurrent_requests"] == 100
    assert facts.keys() == INFO_FIELDS
    assert (await fetch(served, "/info")).json()["served_model_name"] == "first"
    assert (await fetch(served, "/info?model=none")).status_code == 404


async def test_without_an_encoder_there_is_no_info() -> None:
    assert (await fetch(FakeEncoders(), "/info")).status_code == 404


async def test_tokens_are_told_by_their_bytes() -> None:
    served = embedder(prompts={"query": "w9 "})
    (tokens,) = await answer(served, "/tokenize", inputs="é w6")
    assert tokens == [
        {"id": 2, "text": "w2", "special": True, "start": None, "stop": None},
        {"id": 1, "text": "é", "special": False, "start": 0, "stop": 2},
        {"id": 6, "text": "w6", "special": False, "start": 3, "stop": 5},
        {"id": 3, "text": "w3", "special": True, "start": None, "stop": None},
    ]
    body = {"inputs": ["w5", "w6"], "prompt_name": "query", "add_special_tokens": False}
    tokens = await answer(served, "/tokenize", **body)
    assert [[token["text"] for token in text] for text in tokens] == [["w9", "w5"], ["w9", "w6"]]
    assert tokens[0][1]["start"] == 3


async def test_vllms_form_of_an_encoder() -> None:
    served = FakeEncoders(make_encoder("one"), make_encoder("two", chats=True))
    body = {"model": "one", "prompt": "w5 w6", "return_token_strs": True}
    tokens = await answer(served, "/tokenize", **body)
    assert tokens == {
        "count": 4,
        "max_model_len": 16,
        "tokens": [2, 5, 6, 3],
        "token_strs": ["w2", "w5", "w6", "w3"],
    }
    chat = {"model": "two", "messages": [{"role": "user", "content": "w7"}]}
    assert (await answer(served, "/tokenize", **chat))["tokens"] == [2, 7]
    text = await answer(served, "/detokenize", model="one", tokens=[2, 5])
    assert text == {"prompt": "w2 w5"}
    refused = await post(served, "/tokenize", {**chat, "tools": [TOOL]})
    assert refused_field(refused) == (400, "tools")
    refused = await post(served, "/tokenize", {**chat, "model": "one"})
    assert refused_field(refused) == (400, "messages")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"inputs": []}, "inputs"),
        ({"inputs": [1]}, "inputs"),
        ({"inputs": "w5", "prompt": "w5"}, "inputs"),
        ({"inputs": "w5", "prompt_name": "query"}, "prompt_name"),
        ({"inputs": ["w5 " * 350_000] * 2}, "inputs"),
    ],
)
async def test_what_cannot_be_tokenised_is_named(body: Any, field: str) -> None:
    config = ServerConfig(max_tokenize_bytes=2**22)
    assert refused_field(await post(embedder(), "/tokenize", body, config)) == (400, field)
