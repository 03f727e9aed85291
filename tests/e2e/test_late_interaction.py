"""Texts compared by the vectors of their tokens, and prompts, over HTTP.

The golden values are sentence-transformers', by scripts/golden_late_interaction.py and
scripts/golden_prompts.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import pytest

from tests.sentence_folders import GOLDEN, WRITERS, write_prompted
from tests.server_process import ServerProcess, serving

FOUND = json.loads((GOLDEN / "late_interaction.json").read_text(encoding="utf-8"))
QUERIES, DOCUMENTS = FOUND["queries"], FOUND["documents"]
PROMPTS = json.loads((GOLDEN / "prompts.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("models")
    writers = {**WRITERS, "prompted": write_prompted}
    with serving({name: write(root / name) for name, write in writers.items()}) as process:
        yield process


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> Any:
    answer = httpx2.post(f"{server.url}{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("model", WRITERS)
def test_scores_are_those_of_sentence_transformers(server: ServerProcess, model: str) -> None:
    golden = FOUND["scores"][model]
    for query, wanted in zip(QUERIES, golden, strict=True):
        body = {"model": model, "query": query, "documents": DOCUMENTS}
        results = post(server, "/v1/rerank", body)["results"]
        scores = {result["index"]: result["relevance_score"] for result in results}
        assert [scores[place] for place in range(len(DOCUMENTS))] == pytest.approx(wanted, abs=1e-4)
        assert list(scores) == sorted(scores, key=lambda place: -wanted[place])
    # Each query is compared with one document.
    body = {"model": model, "text_1": QUERIES, "text_2": DOCUMENTS[: len(QUERIES)]}
    scores = [entry["score"] for entry in post(server, "/score", body)["data"]]
    assert scores == pytest.approx([row[place] for place, row in enumerate(golden)], abs=1e-4)


def test_it_ranks_where_nobody_names_a_model(server: ServerProcess) -> None:
    ranked = post(server, "/rerank", {"query": QUERIES[0], "texts": DOCUMENTS, "return_text": True})
    golden = FOUND["scores"]["stanford"][0]
    assert [entry["text"] for entry in ranked] == [
        DOCUMENTS[place] for place in sorted(range(4), key=lambda place: -golden[place])
    ]


@pytest.mark.parametrize(("model", "longest"), [("stanford", 12), ("pylate", 12), ("native", 40)])
def test_long_texts_are_refused_or_cut(server: ServerProcess, model: str, longest: int) -> None:
    long = " ".join(["w40"] * 60)
    for body, param in [
        ({"query": long, "documents": DOCUMENTS}, "query"),
        ({"query": "w40", "documents": ["w41", long]}, "documents"),
    ]:
        answer = httpx2.post(f"{server.url}/rerank", json={"model": model, **body})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert error["code"] == "context_length_exceeded"
        post(server, "/rerank", {"model": model, **body, "truncate_prompt_tokens": -1})
    cut = {"model": model, "documents": ["w41"], "truncate_prompt_tokens": -1}
    usage = [
        post(server, "/rerank", {**cut, "query": query})["usage"]["prompt_tokens"]
        for query in (long, "w40")
    ]
    # A shorter query is padded to this length.
    short = {"stanford": 12, "pylate": 12, "native": 10}[model]
    assert usage[0] - usage[1] == longest - short


@pytest.mark.parametrize("model", WRITERS)
def test_clients_may_compare_themselves(server: ServerProcess, model: str) -> None:
    def vectors(side: str, texts: list[str]) -> list[np.ndarray]:
        body = {"model": model, "task": "token_embed", "input_type": side, "input": texts}
        return [np.array(entry["data"]) for entry in post(server, "/pooling", body)["data"]]

    (query,) = vectors("query", QUERIES[1:2])
    best = [(query @ document.T).max(axis=1) for document in vectors("document", DOCUMENTS)]
    scores = [match.mean() if model == "native" else match.sum() for match in best]
    assert scores == pytest.approx(FOUND["scores"][model][1], abs=1e-4)


@pytest.mark.parametrize(
    "body",
    [
        {"model": "prompted", "task": "token_embed", "input": "w5"},
        {"model": "stanford", "task": "embed", "input": "w5"},
        {"model": "stanford", "input": [5]},
        {"model": "stanford", "messages": [{"role": "user", "content": "w5"}]},
    ],
)
def test_an_input_type_is_for_what_is_compared(server: ServerProcess, body: Any) -> None:
    answer = httpx2.post(f"{server.url}/pooling", json={**body, "input_type": "query"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input_type")


def test_every_token_of_a_text_has_a_vector(server: ServerProcess) -> None:
    body = {"model": "stanford", "input": DOCUMENTS[:1]}
    (entry,) = post(server, "/pooling", body)["data"]
    # The tokens are [CLS] and [SEP] around six words and marks.
    assert [len(vector) for vector in entry["data"]] == [8] * 8
    info = httpx2.get(f"{server.url}/info", params={"model": "stanford"}).json()
    assert info["model_type"] == {"embedding": {"pooling": "none"}}


@pytest.mark.parametrize("name", [None, "query", "passage"])
def test_a_vector_leaves_its_prompt_out(server: ServerProcess, name: str | None) -> None:
    body = {"model": "prompted", "input": PROMPTS["texts"], "prompt_name": name}
    data = post(server, "/v1/embeddings", body)["data"]
    wanted = np.array(PROMPTS[name or "none"])
    np.testing.assert_allclose([entry["embedding"] for entry in data], wanted, atol=1e-4)
    tei = {"model": "prompted", "inputs": PROMPTS["texts"], "prompt_name": name}
    embedded = post(server, "/embed", {**tei, "normalize": False})
    np.testing.assert_allclose(embedded, wanted, atol=1e-4)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/score"])
def test_embedders_rank_with_their_prompts(server: ServerProcess, path: str) -> None:
    query, *documents = PROMPTS["texts"]
    body = {"model": "prompted", "documents": documents}
    side = {"query": query} if path == "/v1/rerank" else {"queries": query}
    answer = post(server, path, body | side)
    vectors = [PROMPTS["query"][0], *PROMPTS["passage"][1:]]
    first, *others = (np.array(vector) / np.linalg.norm(vector) for vector in vectors)
    results = answer.get("results") or answer["data"]
    scores = {
        result["index"]: result.get("relevance_score", result.get("score")) for result in results
    }
    assert [scores[place] for place in range(2)] == pytest.approx(
        [first @ other for other in others], abs=1e-4
    )
