"""Ranking over HTTP, by small models with golden values."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from tests.cross_encoder_folder import read_cross_encoder
from tests.scoring_server import DOCUMENTS, QUERY, post, refusal, scores
from tests.server_process import ServerProcess


@pytest.fixture
def server(scoring_server: ServerProcess) -> ServerProcess:
    return scoring_server


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_scores_are_those_of_sentence_transformers(server: ServerProcess, path: str) -> None:
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1], "title": "more"}, DOCUMENTS[2]]
    answer = post(server, path, {"query": QUERY, "documents": documents, "model": "cross"})
    assert answer["model"] == "cross"
    assert answer["id"].startswith("rerank-")
    results = answer["results"]
    assert scores(results) == pytest.approx(read_cross_encoder()["scores"][:3], abs=1e-4)
    assert [result["index"] for result in results] == [0, 2, 1]
    assert [result["document"] for result in results] == [{"text": DOCUMENTS[i]} for i in (0, 2, 1)]
    # A pair is [CLS] query [SEP] document [SEP].
    assert answer["usage"] == {"prompt_tokens": 8 + 14 + 7, "total_tokens": 29}


def test_logits_where_the_body_or_the_model_asks_for_them(server: ServerProcess) -> None:
    golden = read_cross_encoder()["logits"][:3]
    body = {"query": QUERY, "documents": DOCUMENTS}
    raw = post(server, "/rerank", {**body, "model": "cross", "use_activation": False})
    assert scores(raw["results"]) == pytest.approx(golden, abs=1e-4)
    own = post(server, "/rerank", {**body, "model": "logits"})
    assert scores(own["results"]) == pytest.approx(golden, abs=1e-4)


def test_an_embedder_ranks_by_cosine(server: ServerProcess) -> None:
    body = {"query": "w10 w11", "documents": ["w50 w51 w52", "w10 w11"], "model": "embedder"}
    answer = post(server, "/v1/rerank", {**body, "top_n": 1, "return_documents": False})
    assert answer["results"] == [{"index": 1, "relevance_score": pytest.approx(1, abs=1e-5)}]
    assert answer["usage"]["prompt_tokens"] == 4 + 5 + 4
    vectors = post(
        server, "/v1/embeddings", {"input": ["w10 w11", "w50 w51 w52"], "model": "embedder"}
    )["data"]
    first, second = (vector["embedding"] for vector in vectors)
    cosine = sum(a * b for a, b in zip(first, second, strict=True))
    ranked = scores(post(server, "/v1/rerank", body)["results"])
    assert ranked[0] == pytest.approx(cosine, abs=1e-4)


def test_equal_documents_keep_their_order(server: ServerProcess) -> None:
    body = {"query": QUERY, "documents": ["w44", "w20 w21", "w44", "w20 w21"]}
    results = post(server, "/v1/rerank", body)["results"]
    assert [result["index"] for result in results] == [1, 3, 0, 2]


def test_teis_form(server: ServerProcess) -> None:
    golden = read_cross_encoder()
    body = {"query": QUERY, "texts": DOCUMENTS}
    ranked = post(server, "/rerank", body)
    assert [sorted(entry) for entry in ranked] == [["index", "score"]] * 3
    assert [entry["index"] for entry in ranked] == [0, 2, 1]
    assert scores(ranked, "score") == pytest.approx(golden["scores"][:3], abs=1e-4)
    raw = post(server, "/rerank", {**body, "raw_scores": True, "return_text": True})
    assert scores(raw, "score") == pytest.approx(golden["logits"][:3], abs=1e-4)
    assert [entry["text"] for entry in raw] == [DOCUMENTS[i] for i in (0, 2, 1)]


def test_the_document_of_a_long_pair_is_cut_where_that_is_asked(server: ServerProcess) -> None:
    long = "w20 w21" + " w30" * 60
    body = {"query": QUERY, "documents": ["w7", long], "model": "cross"}
    error = refusal(server, "/rerank", body)
    assert error["code"] == "context_length_exceeded"
    assert "documents 1 has 68" in error["message"]
    cut = post(server, "/rerank", {**body, "truncate_prompt_tokens": 8})
    short = post(server, "/rerank", {**body, "documents": ["w7", "w20 w21"]})
    assert scores(cut["results"]) == pytest.approx(scores(short["results"]), abs=1e-4)
    tei = post(server, "/rerank", {"query": QUERY, "texts": [long], "truncate": True})
    whole = post(server, "/rerank", {"query": QUERY, "documents": ["w20 w21" + " w30" * 32]})
    assert scores(tei, "score") == pytest.approx(scores(whole["results"]), abs=1e-4)


@pytest.mark.parametrize("model", ["cross", "embedder"])
def test_documents_are_cut_one_by_one(server: ServerProcess, model: str) -> None:
    long = ["w20 w21 w22" + " w30" * 60, "w7 w8", "w9"]
    body = {"query": QUERY, "model": model}
    cut = post(server, "/v2/rerank", {**body, "documents": long, "max_tokens_per_doc": 2})
    short = post(server, "/v2/rerank", {**body, "documents": ["w20 w21", "w7 w8", "w9"]})
    assert scores(cut["results"]) == pytest.approx(scores(short["results"]), abs=1e-4)
    # The documents come back as they were sent.
    assert {result["document"]["text"] for result in cut["results"]} == set(long)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"query": "w5"}, "documents"),
        ({"query": "w5", "documents": ["w5"], "truncation_side": "left"}, "truncation_side"),
        ({"query": "w5", "documents": ["w5"], "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        ({"query": "w5", "documents": ["w5"], "max_tokens_per_query": 5}, "max_tokens_per_query"),
        ({"documents": ["w5"]}, "query"),
        ({"query": "w5", "documents": []}, "documents"),
        ({"query": "w5", "texts": []}, "texts"),
        ({"query": "w5", "documents": ["w5"], "texts": ["w5"]}, "documents"),
        ({"query": "w5", "documents": ["w5"] * 10_000}, "documents"),
        ({"query": "w5", "documents": "w5"}, "documents"),
        ({"query": "w5", "documents": [5]}, "documents"),
        ({"query": "w5", "documents": [{"title": "w5"}]}, "documents"),
        ({"query": ["w5"], "documents": ["w5"]}, "query"),
        ({"query": "w5", "documents": ["w5"], "top_n": -1}, "top_n"),
        ({"query": "w5", "documents": ["w5"], "top_n": "1"}, "top_n"),
        ({"query": "w5", "documents": ["w5"], "truncate_prompt_tokens": 99}, "truncate"),
        ({"query": "w5", "texts": ["w5"], "truncation_direction": "Left"}, "truncation_direction"),
        ({"query": "w5", "documents": ["w5 " * 350_000]}, "documents"),
        ({"query": "w5", "documents": ["w5"], "model": "three"}, "model"),
    ],
)
def test_bad_rankings_name_the_field(
    server: ServerProcess, body: dict[str, Any], param: str
) -> None:
    assert refusal(server, "/v1/rerank", body)["param"].startswith(param)


def test_unknown_models_and_fields(server: ServerProcess) -> None:
    body = {"query": QUERY, "documents": ["w5"]}
    assert httpx2.post(f"{server.url}/rerank", json={**body, "model": "no"}).status_code == 404
    answer = httpx2.post(f"{server.url}/rerank", json={**body, "max_chunks_per_doc": 10})
    assert answer.status_code == 200
    assert answer.headers["x-ignored-fields"] == "max_chunks_per_doc"
