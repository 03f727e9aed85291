"""Hugging Face's task form, by its own client, against what transformers' pipelines answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import httpx2
import numpy as np
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from tests.embedder_folder import MAX_LEN, write_embedder
from tests.server_process import ServerProcess
from tests.task_folders import assert_alike, golden_pipelines, write_task_model

PIPELINES = golden_pipelines()
NAMES = [f"org/model-{number}" for number in range(len(PIPELINES))]
EMBEDDER = "org/embedder"
CALLS = [
    pytest.param(name, pipeline["task"], call, id=f"{pipeline['encoder']}-{number}")
    for name, pipeline in zip(NAMES, PIPELINES, strict=True)
    for number, call in enumerate(pipeline["calls"])
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folders = [
        write_task_model(tmp_path_factory.mktemp("model"), pipeline["encoder"], pipeline["config"])
        for pipeline in PIPELINES
    ]
    folders.append(write_embedder(tmp_path_factory.mktemp("embedder"), normalizes=False))
    names = [f"{folder}={name}" for folder, name in zip(folders, [*NAMES, EMBEDDER], strict=True)]
    process = ServerProcess("--model", *map(str, folders), "--served-model-name", *names)
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.stop()


def golden(encoder: str, call: int) -> tuple[str, dict[str, Any]]:
    """Return the name of a model, and one of its calls."""
    pipeline = next(candidate for candidate in PIPELINES if candidate["encoder"] == encoder)
    return NAMES[PIPELINES.index(pipeline)], pipeline["calls"][call]


def client(server: ServerProcess, name: str | None = None) -> InferenceClient:
    return InferenceClient(model=server.url if name is None else f"{server.url}/models/{name}")


def fields_of(element: Any) -> dict[str, Any]:
    """Return the fields of an element that the answer had."""
    return {key: value for key, value in dict(element).items() if value is not None}


def post(server: ServerProcess, path: str, body: Any) -> Any:
    answer = httpx2.post(f"{server.url}{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_client_is_told_what_is_served(server: ServerProcess) -> None:
    info = InferenceClient(model=server.url, provider="hf-inference").get_endpoint_info()
    assert info["served_model_name"] in NAMES
    assert info["model_type"].keys() <= {"embedding", "classifier", "reranker"}


@pytest.mark.parametrize(("name", "task", "call"), CALLS)
def test_answers_are_those_of_transformers(
    server: ServerProcess, name: str, task: str, call: dict[str, Any]
) -> None:
    body = {"inputs": call["inputs"], "parameters": call["parameters"]}
    assert_alike(post(server, f"/models/{name}", body), call["answer"])
    if call is PIPELINES[0]["calls"][0]:
        for path in (f"/pipeline/{task}/{name}", f"/models/{name}/pipeline/{task}"):
            assert_alike(post(server, path, body), call["answer"])


def test_fill_mask(server: ServerProcess) -> None:
    call = PIPELINES[0]["calls"][5]
    predicted = client(server).fill_mask(call["inputs"], **call["parameters"])
    assert_alike([fields_of(element) for element in predicted], call["answer"])
    roberta = PIPELINES[1]["calls"][1]
    # The text has the mask token of another model than the first.
    predicted = client(server).fill_mask(roberta["inputs"], top_k=3)
    assert [element.token for element in predicted] == [
        element["token"] for element in roberta["answer"]
    ]


MASKED = {
    pipeline["encoder"]: name
    for name, pipeline in zip(NAMES, PIPELINES, strict=True)
    if pipeline["task"] == "fill-mask"
}


@pytest.mark.parametrize("encoder", MASKED)
def test_every_route_takes_both_ways_to_write_a_mask(server: ServerProcess, encoder: str) -> None:
    name = MASKED[encoder]
    own = "[MASK]" if encoder == "bert_masked_lm" else "<mask>"

    def told(mask: str) -> list[Any]:
        """Return the answers of all routes that read masks."""
        text, words = f"the cat is {mask} in paris.", {"good": 10, "bad": 11}
        objective = {"template": f"{{text}} is {mask}.", "label_words": words}
        rows = [{"text": "the cat", "label": "good"}, {"text": "the dog", "label": "bad"}]
        body = {"objective": {"kind": "label_words", **objective}, "data": rows, "batch_size": 2}
        session = post(server, "/v1/mezo/sessions", {"model": name, "seed": 1, **body})["id"]
        steps = post(server, f"/v1/mezo/sessions/{session}/step", {"steps": 2})["data"]
        httpx2.delete(f"{server.url}/v1/mezo/sessions/{session}").raise_for_status()
        masked = {"model": name, "texts": [text, f"{mask} and {mask}"], "return_top_k": 2}
        return [
            post(server, f"/models/{name}", {"inputs": text, "parameters": {"top_k": 3}}),
            [row["predictions"] for row in post(server, "/v1/mlm", masked)["data"]],
            [(step["loss_plus"], step["gradients"]) for step in steps],
        ]

    assert told("[MASK]") == told(own)


def test_targets_that_are_no_tokens_are_told(server: ServerProcess) -> None:
    body = {"inputs": "a [MASK]", "parameters": {"targets": ["happiness\u00e9", "cat"]}}
    answer = httpx2.post(f"{server.url}/models/{NAMES[0]}", json=body)
    warning = r"'happiness\xe9' is not in the vocabulary; its first token '[UNK]' is used."
    assert answer.headers["x-warnings"] == warning


def test_a_text_without_a_mask_is_refused(server: ServerProcess) -> None:
    with pytest.raises(HfHubHTTPError, match=r"inputs 0 has no \[MASK\]") as refusal:
        client(server, NAMES[0]).fill_mask("the cat")
    assert refusal.value.response.status_code == 400


def test_text_classification(server: ServerProcess) -> None:
    name, call = golden("bert_sequence", 0)
    labels = client(server, name).text_classification(call["inputs"][0])
    assert_alike([fields_of(element) for element in labels], call["answer"][0])
    name, call = golden("bert_sequence", 4)
    # The parameters imply the task, and this is the first model with it.
    labels = client(server).text_classification(call["inputs"][1], function_to_apply="none")
    assert_alike([fields_of(element) for element in labels], call["answer"][1])
    labels = client(server, name).text_classification(call["inputs"][1], top_k=1)
    assert [element.label for element in labels] == [call["answer"][1][0]["label"]]


def test_token_classification(server: ServerProcess) -> None:
    name, call = golden("bert_token", 2)
    groups = client(server, name).token_classification(call["inputs"], aggregation_strategy="first")
    assert_alike([fields_of(group) for group in groups], call["answer"])
    name, call = golden("bert_token", 1)
    assert call["parameters"] == {"aggregation_strategy": "simple"}
    groups = client(server, name).token_classification(call["inputs"])
    assert_alike([fields_of(group) for group in groups], call["answer"])


def test_tokens_of_a_text_that_is_cut(server: ServerProcess) -> None:
    name, call = golden("bert_token", 5)
    text = " ".join([call["inputs"]] * 6)
    body = {"inputs": text, "parameters": {**call["parameters"], "truncate": True}}
    entries = post(server, f"/models/{name}", body)
    assert [entry["index"] for entry in entries] == list(range(1, 39))
    body["parameters"]["truncate"] = False
    answer = httpx2.post(f"{server.url}/models/{name}", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_feature_extraction(server: ServerProcess) -> None:
    texts = ["w5 w6", "w7"]
    inference = client(server, EMBEDDER)
    features = inference.feature_extraction(texts)
    body = {"model": EMBEDDER, "input": texts}
    data = httpx2.post(f"{server.url}/v1/embeddings", json=body).json()["data"]
    np.testing.assert_allclose(features, [row["embedding"] for row in data], atol=1e-5)
    np.testing.assert_allclose(inference.feature_extraction(texts[0]), features[:1], atol=1e-5)
    assert abs(np.linalg.norm(features[0]) - 1) > 0.1
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    np.testing.assert_allclose(inference.feature_extraction(texts, normalize=True), unit, atol=1e-5)
    long = " ".join(f"w{5 + number}" for number in range(60))
    sides: list[tuple[Literal["left", "right"], range]] = [
        ("right", range(22)),
        ("left", range(38, 60)),
    ]
    for side, kept in sides:
        cut = inference.feature_extraction(long, truncate=True, truncation_direction=side)
        text = " ".join(f"w{5 + number}" for number in kept)
        assert len(kept) == MAX_LEN - 2
        np.testing.assert_allclose(cut, inference.feature_extraction(text), atol=1e-5)


def test_sentence_similarity(server: ServerProcess) -> None:
    texts = ["w5 w6", "w7", "w5 w6 w8"]
    vectors = client(server, EMBEDDER).feature_extraction(texts, normalize=True)
    similarities = client(server, EMBEDDER).sentence_similarity(texts[0], texts)
    np.testing.assert_allclose(similarities, vectors @ vectors[0], atol=1e-5)
    # Every model has vectors; without a name the first one's are compared.
    assert len(client(server).sentence_similarity("the cat", ["the dog"])) == 1


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("", {}, 400, "inputs"),
        ("", {"inputs": 5}, 400, "inputs"),
        ("", {"inputs": []}, 400, "inputs"),
        ("", {"inputs": ["a", 5]}, 400, "inputs"),
        ("", {"inputs": "no mask"}, 400, "inputs"),
        ("", {"inputs": {"text": "a"}}, 400, "inputs"),
        ("", {"inputs": {"sentences": ["a"]}}, 400, "inputs"),
        ("", {"inputs": {"source_sentence": "a", "sentences": []}}, 400, "inputs"),
        ("", {"inputs": "a [MASK]", "parameters": {"top_k": 0}}, 400, "parameters"),
        ("", {"inputs": "a [MASK]", "parameters": {"targets": []}}, 400, "parameters"),
        ("", {"inputs": "a", "function_to_apply": "tanh"}, 400, "function_to_apply"),
        ("", {"inputs": "a", "prompt_name": "query"}, 400, "prompt_name"),
        ("", {"inputs": "a", "dimensions": 5}, 400, "dimensions"),
        ("/models/none", {"inputs": "a"}, 404, "model"),
        ("/models/none/pipeline/ner", {"inputs": "a"}, 404, "model"),
        ("/pipeline/summarization", {"inputs": "a"}, 400, "model"),
        ("/pipeline/speaking", {"inputs": "a"}, 400, "task"),
        (f"/pipeline/fill-mask/{EMBEDDER}", {"inputs": "a"}, 400, "model"),
    ],
)
def test_bad_requests_name_the_field(
    server: ServerProcess, path: str, body: Any, status: int, param: str
) -> None:
    answer = httpx2.post(f"{server.url}{path}", json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param
