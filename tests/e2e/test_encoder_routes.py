"""Encoders' routes over HTTP, by a server of small models whose values are known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import pytest

from mlx_parallm.api.convert.activation import activated
from tests.embedder_folder import write_embedder, write_encoder_of
from tests.encoder_folders import read_golden
from tests.server_process import ServerProcess, serving

MODELS = {"classifier": "bert_sequence", "tagger": "bert_token", "mlm": "bert_masked_lm"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("models")
    folders = {name: write_encoder_of(root / name, MODELS[name]) for name in MODELS}
    folders["embedder"] = write_embedder(root / "embedder")
    with serving(folders) as process:
        yield process


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> Any:
    answer = httpx2.post(f"{server.url}{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def words(ids: list[int]) -> str:
    return " ".join(f"w{one}" for one in ids)


def test_a_classifiers_probabilities_are_those_of_transformers(server: ServerProcess) -> None:
    golden = read_golden("bert_sequence")
    body = {"input": golden["inputs"]["input_ids"]}
    data = post(server, "/classify", body)["data"]
    wanted = activated(np.array(golden["logits"]), None)
    np.testing.assert_allclose([one["probs"] for one in data], wanted, atol=1e-4)
    assert [one["label"] for one in data] == ["abc"[one] for one in wanted.argmax(axis=1)]
    data = post(server, "/v1/classify", body | {"use_activation": False})["data"]
    np.testing.assert_allclose([one["probs"] for one in data], golden["logits"], atol=1e-4)
    # A text is read with the special tokens around it.
    text, ids = words(golden["inputs"]["input_ids"][1]), golden["inputs"]["input_ids"][1]
    given = [post(server, "/classify", {"input": one})["data"] for one in (text, [2, *ids, 3])]
    np.testing.assert_allclose(given[0][0]["probs"], given[1][0]["probs"], atol=1e-5)


def test_every_token_has_its_vector_or_its_labels(server: ServerProcess) -> None:
    golden = read_golden("bert_token")
    ids = golden["inputs"]["input_ids"]
    body = {"input": ids, "model": "tagger"}
    found = post(server, "/pooling", body | {"use_activation": False})["data"]
    for one, logits in zip(found, golden["logits"], strict=True):
        np.testing.assert_allclose(one["data"], np.array(logits)[: len(one["data"])], atol=1e-4)
    vectors = post(server, "/pooling", body | {"task": "token_embed"})["data"]
    for one, hidden in zip(vectors, golden["hidden"], strict=True):
        np.testing.assert_allclose(one["data"], np.array(hidden)[: len(one["data"])], atol=1e-4)
    assert [len(one["data"]) for one in vectors] == [len(one) for one in ids]


def test_a_large_body_is_read_and_what_does_not_fit_is_named(server: ServerProcess) -> None:
    body = {"model": "embedder", "input": ["w5 " * 333_334]}
    answer = httpx2.post(f"{server.url}/v1/embeddings", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    cut = post(server, "/v1/embeddings", body | {"truncate_prompt_tokens": -1})
    assert cut["usage"]["prompt_tokens"] == 24
    answer = httpx2.post(f"{server.url}/v1/embeddings", json=body | {"input": ["w5"] * 10_000})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


def test_teis_routes(server: ServerProcess) -> None:
    golden = read_golden("bert_sequence")
    ids = golden["inputs"]["input_ids"][1]
    texts = ["w5 w6", "w7"]
    vectors = np.array(post(server, "/embed", {"inputs": texts, "model": "embedder"}))
    openai = post(server, "/v1/embeddings", {"input": texts, "model": "embedder"})["data"]
    np.testing.assert_allclose(vectors, [one["embedding"] for one in openai], atol=1e-5)
    body = {"inputs": {"source_sentence": texts[0], "sentences": texts}, "model": "embedder"}
    cosines = post(server, "/similarity", body)
    np.testing.assert_allclose(cosines, vectors @ vectors[0], atol=1e-5)
    # The first that can do it is taken where no model is named.
    (weights,) = post(server, "/embed_sparse", {"inputs": texts[:1]})
    assert [one["index"] for one in weights] == sorted({one["index"] for one in weights})
    assert all(one["value"] > 0 for one in weights)
    pair = post(server, "/predict", {"inputs": [words(ids), "w5"], "raw_scores": True})
    both = post(server, "/predict", {"inputs": [[words(ids), "w5"], ["w5"]], "raw_scores": True})
    assert [one["label"] for one in both[0]] == [one["label"] for one in pair]
    np.testing.assert_allclose(
        [one["score"] for one in both[0]], [one["score"] for one in pair], atol=1e-5
    )
    assert post(server, "/decode", {"ids": [5, 6], "model": "mlm"}) == ["w5 w6"]
    (tokens,) = post(server, "/tokenize", {"inputs": "W5  é", "model": "embedder"})
    assert [(one["id"], one["text"], one["start"], one["stop"]) for one in tokens] == [
        (2, "[CLS]", None, None),
        (5, "W5", 0, 2),
        (1, "é", 4, 6),
        (3, "[SEP]", None, None),
    ]
    info = httpx2.get(f"{server.url}/info", params={"model": "embedder"}).json()
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert (info["max_input_length"], info["model_dtype"]) == (24, "float32")
