"""Scores of pairs and labels over HTTP, by small models with golden values."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.cross_encoder_folder import read_cross_encoder
from tests.scoring_server import DOCUMENTS, QUERY, post, refusal, scores
from tests.server_process import ServerProcess


@pytest.fixture
def server(scoring_server: ServerProcess) -> ServerProcess:
    return scoring_server


@pytest.mark.parametrize(
    ("first", "second"),
    [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")],
)
def test_pairs_under_all_their_names(server: ServerProcess, first: str, second: str) -> None:
    golden = read_cross_encoder()
    one = {first: QUERY, second: DOCUMENTS, "model": "cross"}
    answer = post(server, "/score", one)
    assert answer["object"] == "list"
    assert answer["model"] == "cross"
    assert [(each["index"], each["object"]) for each in answer["data"]] == [
        (place, "score") for place in range(3)
    ]
    assert scores(answer["data"], "score") == pytest.approx(golden["scores"][:3], abs=1e-4)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == 29
    queries, documents = zip(*golden["pairs"], strict=True)
    every = {first: queries, second: documents, "model": "logits", "request_id": "a"}
    answer = post(server, "/v1/score", every)
    assert answer["id"] == "score-a"
    assert scores(answer["data"], "score") == pytest.approx(golden["logits"], abs=1e-4)


def test_an_embedders_score_is_the_cosine(server: ServerProcess) -> None:
    asked = {"text_1": ["w10 w11", "w50"], "text_2": ["w10 w11", "w51 w52"], "model": "embedder"}
    one, other = scores(post(server, "/score", asked)["data"], "score")
    assert one == pytest.approx(1, abs=1e-5)
    assert abs(other) < 0.999


def next_probabilities(server: ServerProcess, prompt: Any, labels: list[int]) -> list[float]:
    """As completions tell them."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    body |= {"logprob_token_ids": labels, "return_tokens_as_token_ids": True}
    told = post(server, "/v1/completions", body)["choices"][0]["logprobs"]["top_logprobs"][0]
    return [math.exp(told[f"token_id:{one}"]) for one in labels]


def test_labels_after_a_query_and_items(server: ServerProcess) -> None:
    labels = [70, 80, 90]
    items = ["1, 2, 3,", " what?"]
    asked = {"query": "Go on: ", "items": items, "label_token_ids": labels, "model": "demo"}
    answer = post(server, "/v1/score", asked)
    assert (answer["object"], answer["model"]) == ("scoring", "demo")
    wanted = [next_probabilities(server, f"Go on: {one}", labels) for one in items]
    for found, want in zip(answer["scores"], wanted, strict=True):
        assert found == pytest.approx(want, rel=1e-3)
    among = post(server, "/v1/score", {**asked, "apply_softmax": True})["scores"]
    for found, want in zip(among, wanted, strict=True):
        assert found == pytest.approx([one / sum(want) for one in want], rel=1e-3)
    turned = post(server, "/v1/score", {**asked, "item_first": True})["scores"][0]
    assert turned == pytest.approx(next_probabilities(server, "1, 2, 3,Go on: ", labels), rel=1e-3)
    ids = {"query": [1, 40, 41], "items": [[42], [43, 44]]}
    found = post(server, "/v1/score", {**asked, **ids})
    assert found["usage"]["prompt_tokens"] == 9
    assert found["scores"][1] == pytest.approx(
        next_probabilities(server, [1, 40, 41, 43, 44], labels), rel=1e-3
    )
    # vLLM's name for it tells the first label's share of all labels.
    answer = post(server, "/generative_scoring", {**asked, **ids})
    assert answer["object"] == "list"
    first = [one[0] / sum(one) for one in found["scores"]]
    assert scores(answer["data"], "score") == pytest.approx(first, rel=1e-3)


def test_a_classifiers_labels_are_its_own(server: ServerProcess) -> None:
    asked = {"query": "w10 w11 ", "items": ["w20", "w30"], "model": "three"}
    logits = post(server, "/v1/score", asked)["scores"]
    whole = {"input": ["w10 w11 w20", "w10 w11 w30"], "model": "three"}
    plain = post(server, "/classify", {**whole, "use_activation": False})["data"]
    for found, want in zip(logits, plain, strict=True):
        assert found == pytest.approx(want["probs"], abs=1e-4)
    shares = post(server, "/v1/score", {**asked, "apply_softmax": True})["scores"]
    for found, want in zip(shares, post(server, "/classify", whole)["data"], strict=True):
        assert found == pytest.approx(want["probs"], abs=1e-4)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text_1"),
        ({"text_1": "w5"}, "text_1"),
        ({"text_1": "w5", "documents": "w5"}, "documents"),
        ({"text_1": [], "text_2": "w5"}, "text_1"),
        ({"text_1": ["w5", "w6"], "text_2": ["w5"]}, "text_1"),
        ({"text_1": "w5", "text_2": ["w5"] * 10_000}, "text_2"),
        ({"text_1": "w5", "text_2": [5]}, "text_2"),
        ({"text_1": "w5", "text_2": "w5 " * 350_000}, "text_2"),
        ({"queries": "w5", "items": [[5]]}, "items"),
        ({"text_1": "w5", "text_2": "w5", "model": "three"}, "model"),
        ({"text_1": "w5", "text_2": "w5", "model": "demo"}, "model"),
        (
            {
                "text_1": "w5",
                "text_2": "w5",
                "truncate_prompt_tokens": 3,
                "truncation_side": "left",
            },
            "truncation_side",
        ),
        ({"query": "w5"}, "items"),
        ({"query": "w5", "items": []}, "items"),
        ({"query": "w5", "items": ["w5"]}, "label_token_ids"),
        ({"query": "w5", "items": ["w5"], "label_token_ids": [10**9]}, "label_token_ids"),
        ({"query": "w5", "items": ["w5"], "label_token_ids": [-1]}, "label_token_ids"),
        ({"query": "w5", "items": ["w5"], "label_token_ids": [1], "model": "cross"}, "label"),
        ({"query": "w5", "items": ["w5"] * 8000, "label_token_ids": [1]}, "items"),
        ({"query": [5], "items": ["w5"], "model": "cross"}, "items"),
        ({"query": 5, "items": ["w5"]}, "query"),
        ({"query": "w5", "items": "w5", "label_token_ids": [1], "truncate_prompt_tokens": 2}, "tr"),
    ],
)
def test_bad_scores_name_the_field(server: ServerProcess, body: dict[str, Any], param: str) -> None:
    assert refusal(server, "/v1/score", body)["param"].startswith(param)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/score", "/v1/rewards/score"])
def test_results_that_are_no_numbers_fail_alone(server: ServerProcess, path: str) -> None:
    bodies = {
        "/v1/rerank": {"query": QUERY, "documents": DOCUMENTS},
        "/v1/score": {"text_1": QUERY, "text_2": DOCUMENTS},
        "/v1/rewards/score": {"texts": DOCUMENTS},
    }
    with ThreadPoolExecutor(4) as pool:
        good = pool.map(lambda _: post(server, path, {**bodies[path], "model": "cross"}), range(4))
        error = refusal(server, path, {**bodies[path], "model": "broken"}, 500)
        assert "not made of numbers" in error["message"]
        assert len(list(good)) == 4


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS}),
        ("/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS}),
        ("/v1/rewards/score", {"texts": DOCUMENTS}),
    ],
)
def test_batches_of_scores(server: ServerProcess, endpoint: str, body: dict[str, Any]) -> None:
    body = {**body, "model": "cross"}
    line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        content = json.dumps(line).encode()
        given = client.files.create(file=("lines.jsonl", content), purpose="batch")
        asked: Any = {"input_file_id": given.id, "endpoint": endpoint}
        batch = client.batches.create(completion_window="24h", **asked)
        while batch.status not in ("completed", "failed", "expired", "cancelled"):
            batch = client.batches.retrieve(batch.id)
        assert batch.output_file_id is not None, batch
        told = json.loads(client.files.content(batch.output_file_id).text)
    wanted = post(server, endpoint, body)
    field = "results" if endpoint == "/v1/rerank" else "data"
    assert told["response"]["body"][field] == wanted[field]
