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
    pair = {first: QUERY, second: DOCUMENTS, "model": "cross"}
    answer = post(server, "/score", pair)
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
    body = {"text_1": ["w10 w11", "w50"], "text_2": ["w10 w11", "w51 w52"], "model": "embedder"}
    alike, other = scores(post(server, "/score", body)["data"], "score")
    assert alike == pytest.approx(1, abs=1e-5)
    assert abs(other) < 0.999


def next_probabilities(server: ServerProcess, prompt: Any, labels: list[int]) -> list[float]:
    """Return the labels' probabilities after a prompt, from a completion."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    body |= {"logprob_token_ids": labels, "return_tokens_as_token_ids": True}
    top = post(server, "/v1/completions", body)["choices"][0]["logprobs"]["top_logprobs"][0]
    return [math.exp(top[f"token_id:{label}"]) for label in labels]


def test_labels_after_a_query_and_items(server: ServerProcess) -> None:
    labels = [70, 80, 90]
    items = ["1, 2, 3,", " what?"]
    body = {"query": "Go on: ", "items": items, "label_token_ids": labels, "model": "demo"}
    answer = post(server, "/v1/score", body)
    assert (answer["object"], answer["model"]) == ("scoring", "demo")
    wanted = [next_probabilities(server, f"Go on: {item}", labels) for item in items]
    for score, want in zip(answer["scores"], wanted, strict=True):
        assert score == pytest.approx(want, rel=1e-3)
    among = post(server, "/v1/score", {**body, "apply_softmax": True})["scores"]
    for score, want in zip(among, wanted, strict=True):
        assert score == pytest.approx([probability / sum(want) for probability in want], rel=1e-3)
    turned = post(server, "/v1/score", {**body, "item_first": True})["scores"][0]
    assert turned == pytest.approx(next_probabilities(server, "1, 2, 3,Go on: ", labels), rel=1e-3)
    ids = {"query": [1, 40, 41], "items": [[42], [43, 44]]}
    score = post(server, "/v1/score", {**body, **ids})
    assert score["usage"]["prompt_tokens"] == 9
    assert score["scores"][1] == pytest.approx(
        next_probabilities(server, [1, 40, 41, 43, 44], labels), rel=1e-3
    )
    # With vLLM's task name the score is the first label's share of all labels.
    answer = post(server, "/generative_scoring", {**body, **ids})
    assert answer["object"] == "list"
    first = [row[0] / sum(row) for row in score["scores"]]
    assert scores(answer["data"], "score") == pytest.approx(first, rel=1e-3)


def test_a_classifiers_labels_are_its_own(server: ServerProcess) -> None:
    body = {"query": "w10 w11 ", "items": ["w20", "w30"], "model": "three"}
    logits = post(server, "/v1/score", body)["scores"]
    whole = {"input": ["w10 w11 w20", "w10 w11 w30"], "model": "three"}
    plain = post(server, "/classify", {**whole, "use_activation": False})["data"]
    for row, want in zip(logits, plain, strict=True):
        assert row == pytest.approx(want["probs"], abs=1e-4)
    shares = post(server, "/v1/score", {**body, "apply_softmax": True})["scores"]
    for row, want in zip(shares, post(server, "/classify", whole)["data"], strict=True):
        assert row == pytest.approx(want["probs"], abs=1e-4)


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
        assert "NaN or infinite" in error["message"]
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
        uploaded = client.files.create(file=("lines.jsonl", content), purpose="batch")
        batch_fields: Any = {"input_file_id": uploaded.id, "endpoint": endpoint}
        batch = client.batches.create(completion_window="24h", **batch_fields)
        while batch.status not in ("completed", "failed", "expired", "cancelled"):
            batch = client.batches.retrieve(batch.id)
        assert batch.output_file_id is not None, batch
        answered = json.loads(client.files.content(batch.output_file_id).text)
    wanted = post(server, endpoint, body)
    field = "results" if endpoint == "/v1/rerank" else "data"
    assert answered["response"]["body"][field] == wanted[field]
