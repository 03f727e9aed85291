"""Encoders' routes over HTTP, by a server of small models whose values are known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import numpy as np
import pytest

from mlx_parallm.api.pooling.vectors.arrays import activated
from mlx_parallm.client.tensors import encode_safetensors
from tests.decoder_folders import write_decoder_of
from tests.embedder_folder import write_embedder, write_encoder_of
from tests.encoder_folders import read_golden
from tests.golden_adapters import (
    golden_tensors,
    golden_upload,
    read_golden_adapter,
    write_golden_adapter,
)
from tests.server_process import ServerProcess, serving

MODELS = {"classifier": "bert_sequence", "tagger": "bert_token", "mlm": "bert_masked_lm"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("models")
    folders = {name: write_encoder_of(root / name, MODELS[name]) for name in MODELS}
    folders["embedder"] = write_embedder(root / "embedder")
    folders["decoder"] = write_decoder_of(root / "decoder", "llama_sequence")
    for name in ("bert_features", "bert_new_head"):
        write_golden_adapter(root / "adapters" / name, read_golden_adapter(name))
    with serving(folders, "--adapter-dir", str(root / "adapters")) as process:
        yield process


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> Any:
    answer = httpx2.post(f"{server.url}{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def words(ids: list[int]) -> str:
    return " ".join(f"w{token_id}" for token_id in ids)


def test_a_classifiers_probabilities_are_those_of_transformers(server: ServerProcess) -> None:
    golden = read_golden("bert_sequence")
    body = {"input": golden["inputs"]["input_ids"]}
    data = post(server, "/classify", body)["data"]
    wanted = activated(np.array(golden["logits"]), None)
    np.testing.assert_allclose([entry["probs"] for entry in data], wanted, atol=1e-4)
    assert [entry["label"] for entry in data] == ["abc"[place] for place in wanted.argmax(axis=1)]
    data = post(server, "/v1/classify", body | {"use_activation": False})["data"]
    np.testing.assert_allclose([entry["probs"] for entry in data], golden["logits"], atol=1e-4)
    # A text is read with the special tokens around it.
    text, ids = words(golden["inputs"]["input_ids"][1]), golden["inputs"]["input_ids"][1]
    answers = [
        post(server, "/classify", {"input": inputs})["data"] for inputs in (text, [2, *ids, 3])
    ]
    np.testing.assert_allclose(answers[0][0]["probs"], answers[1][0]["probs"], atol=1e-5)


def test_every_token_has_its_vector_or_its_labels(server: ServerProcess) -> None:
    golden = read_golden("bert_token")
    ids = golden["inputs"]["input_ids"]
    body = {"input": ids, "model": "tagger"}
    entries = post(server, "/pooling", body | {"use_activation": False})["data"]
    for entry, logits in zip(entries, golden["logits"], strict=True):
        np.testing.assert_allclose(entry["data"], np.array(logits)[: len(entry["data"])], atol=1e-4)
    vectors = post(server, "/pooling", body | {"task": "token_embed"})["data"]
    for entry, hidden in zip(vectors, golden["hidden"], strict=True):
        np.testing.assert_allclose(entry["data"], np.array(hidden)[: len(entry["data"])], atol=1e-4)
    assert [len(entry["data"]) for entry in vectors] == [len(row) for row in ids]


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
    np.testing.assert_allclose(vectors, [entry["embedding"] for entry in openai], atol=1e-5)
    body = {"inputs": {"source_sentence": texts[0], "sentences": texts}, "model": "embedder"}
    cosines = post(server, "/similarity", body)
    np.testing.assert_allclose(cosines, vectors @ vectors[0], atol=1e-5)
    # Without a name the first model with the task answers.
    (weights,) = post(server, "/embed_sparse", {"inputs": texts[:1]})
    assert [weight["index"] for weight in weights] == sorted(
        {weight["index"] for weight in weights}
    )
    assert all(weight["value"] > 0 for weight in weights)
    pair = post(server, "/predict", {"inputs": [words(ids), "w5"], "raw_scores": True})
    both = post(server, "/predict", {"inputs": [[words(ids), "w5"], ["w5"]], "raw_scores": True})
    assert [entry["label"] for entry in both[0]] == [entry["label"] for entry in pair]
    np.testing.assert_allclose(
        [entry["score"] for entry in both[0]], [entry["score"] for entry in pair], atol=1e-5
    )
    assert post(server, "/decode", {"ids": [5, 6], "model": "mlm"}) == ["w5 w6"]
    (tokens,) = post(server, "/tokenize", {"inputs": "W5  é", "model": "embedder"})
    assert [(token["id"], token["text"], token["start"], token["stop"]) for token in tokens] == [
        (2, "[CLS]", None, None),
        (5, "W5", 0, 2),
        (1, "é", 4, 6),
        (3, "[SEP]", None, None),
    ]
    named = {"prompt": "w5", "model": "embedder"}
    assert post(server, "/tokenize", named)["tokens"] == [2, 5, 3]
    info = httpx2.get(f"{server.url}/info", params={"model": "embedder"}).json()
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert (info["max_input_length"], info["model_dtype"]) == (24, "float32")


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx2.Client]:
    """Yield a client; afterwards the server has no adapters."""
    with httpx2.Client(base_url=server.url) as client:
        yield client
        for adapter in client.get("/v1/adapters").json()["data"]:
            client.delete(f"/v1/adapters/{adapter['name']}")


def upload(
    http: httpx2.Client, name: str, model: str, golden: dict[str, Any], content: bytes, **more: str
) -> httpx2.Response:
    config = json.dumps(golden["adapter_config"])
    return http.post(
        "/v1/update_adapter_weights",
        params={"name": name, "model": model, "config": config, **more},
        content=content,
        headers={"content-type": "application/octet-stream"},
    )


def logits_of(http: httpx2.Client, model: str, inputs: Any) -> np.ndarray:
    body = {"model": model, "input": inputs, "use_activation": False}
    answer = http.post("/classify", json=body)
    assert answer.status_code == 200, answer.text
    return np.array([entry["probs"] for entry in answer.json()["data"]])


@pytest.mark.parametrize(
    ("name", "base"), [("bert_sequence", "classifier"), ("llama_sequence", "decoder")]
)
def test_an_adapter_comes_is_served_as_peft_computes_it_and_goes(
    http: httpx2.Client, name: str, base: str
) -> None:
    golden = read_golden_adapter(name)
    ids, wanted = golden["input_ids"], np.array(golden["logits"])
    before = logits_of(http, base, ids)
    answer = upload(http, "mine", base, golden, golden_upload(golden))
    assert answer.status_code == 200, answer.text
    card = {key: answer.json()[key] for key in ("name", "model", "version", "rank")}
    assert card == {"name": "mine", "model": base, "version": "1", "rank": 4}
    for model in ("mine", f"{base}:mine"):
        np.testing.assert_allclose(logits_of(http, model, ids), wanted, atol=1e-4)
    np.testing.assert_allclose(logits_of(http, base, ids), before, atol=1e-5)
    cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    assert (cards["mine"]["parent"], cards["mine"]["status"]) == (base, "loaded")
    num_engines = http.get("/get_world_size").json()["world_size"]
    assert cards[base]["memory"]["adapters_bytes"] == num_engines * answer.json()["bytes"] > 0
    assert http.get("/v1/models/mine").json()["parent"] == base
    chat = {"model": "mine", "messages": [{"role": "user", "content": "w5"}]}
    assert http.post("/v1/chat/completions", json=chat).status_code == 400
    assert http.post("/v1/models/unload", json={"model": "mine"}).status_code == 400
    assert http.delete("/v1/adapters/mine").status_code == 200
    gone = http.post("/classify", json={"model": "mine", "input": ids})
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")


def test_replacing_under_load_gives_each_request_one_version(http: httpx2.Client) -> None:
    golden = read_golden_adapter("bert_sequence")
    contents = [golden_upload(golden, scale=scale) for scale in (1.0, -0.5)]
    texts = [words([5 + (n * k) % 60 for k in range(1, 2 + n % 7)]) for n in range(24)]
    wanted = []
    for content in contents:
        assert upload(http, "mine", "classifier", golden, content).status_code == 200
        wanted.append(logits_of(http, "mine", texts))
    assert np.abs(wanted[0] - wanted[1]).min(axis=1).max() > 1e-3

    def ask(number: int) -> np.ndarray:
        first = number % len(texts)
        order = [*texts[first:], *texts[:first]]
        return np.roll(logits_of(http, "mine", order), first, axis=0)

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(ask, number) for number in range(48)]
        for number in range(12):
            answer = upload(http, "mine", "classifier", golden, contents[number % 2])
            assert answer.json()["version"] == str(number + 3)
        answers = [future.result() for future in futures]
    for logits in answers:
        assert min(np.abs(logits - version).max() for version in wanted) < 1e-5
    # The second version serves now, and no cached result of the first is used.
    np.testing.assert_allclose(logits_of(http, "mine", texts), wanted[1], atol=1e-5)
    assert upload(http, "mine", "classifier", golden, contents[0]).status_code == 200
    np.testing.assert_allclose(logits_of(http, "mine", texts), wanted[0], atol=1e-5)


def test_bad_adapters_are_refused_and_the_one_before_serves_on(http: httpx2.Client) -> None:
    golden, other = (read_golden_adapter(name) for name in ("bert_sequence", "roberta_sequence"))
    content, ids = golden_upload(golden), golden["input_ids"]
    assert upload(http, "mine", "classifier", golden, content).status_code == 200
    tensors = golden_tensors(golden)
    head = "base_model.model.classifier.weight"
    first = next(name for name in tensors if "lora_A" in name)
    bad = {
        "cut": content[:-7],
        "nan": encode_safetensors({**tensors, head: np.full((3, 32), np.nan, np.float32)}),
        "shape": encode_safetensors({**tensors, head: np.zeros((3, 31), np.float32)}),
        "rank": encode_safetensors({**tensors, first: np.zeros((3, 32), np.float32)}),
        "headless": encode_safetensors({name: tensors[name] for name in tensors if "lora" in name}),
        "trunk": encode_safetensors(
            {**tensors, "base_model.model.bert.encoder.classifier.weight": tensors[head]}
        ),
    }
    for why, broken in bad.items():
        answer = upload(http, "mine", "classifier", golden, broken)
        assert answer.status_code == 400, why
        assert answer.json()["error"]["param"] in ("adapter", "adapter_model"), why
    assert upload(http, "mine", "classifier", other, golden_upload(other)).status_code == 400
    answer = upload(http, "mine", "classifier", golden, content, expected_version="7")
    assert answer.status_code == 412
    np.testing.assert_allclose(logits_of(http, "mine", ids), golden["logits"], atol=1e-4)
    assert http.get("/v1/adapters/mine").json()["version"] == "1"


def test_adapters_are_found_by_name_in_their_directory(http: httpx2.Client) -> None:
    golden = read_golden_adapter("bert_new_head")
    ids = golden["input_ids"]
    # The embedder has no labels; the adapter brings a head for them.
    refused = http.post("/classify", json={"model": "embedder", "input": ids})
    assert refused.status_code == 400
    logits = logits_of(http, "embedder:bert_new_head", ids)
    np.testing.assert_allclose(logits, golden["logits"], atol=1e-4)
    both = [http.post("/embed", json={"inputs": "w5 w6", "model": model}).json() for model in
            ("bert_new_head", "embedder")]  # fmt: skip
    assert np.abs(np.array(both[0]) - np.array(both[1])).max() > 1e-3
    body = {"lora_name": "mine", "lora_path": "bert_features", "base_model_name": "embedder"}
    assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
    hidden = read_golden_adapter("bert_features")["last_hidden_state"]
    body = {"model": "mine", "input": ids, "task": "token_embed", "normalize": False}
    answer = http.post("/pooling", json=body).json()["data"]
    for entry, expected in zip(answer, hidden, strict=True):
        np.testing.assert_allclose(entry["data"], np.array(expected), atol=1e-4)
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "mine"}).status_code == 200


def test_an_adapter_of_a_classifier_may_be_a_reward_model(http: httpx2.Client) -> None:
    golden = read_golden_adapter("bert_sequence")
    tensors = golden_tensors(golden)
    of_one = {name: tensor[:1] for name, tensor in tensors.items() if "classifier" in name}
    content = encode_safetensors(tensors | of_one)
    assert upload(http, "judge", "classifier", golden, content).status_code == 200
    assert "judge" in http.get("/v1/rl/capabilities").json()["reward_models"]
    # The adapter's model has three labels.
    refused = http.post("/v1/rewards/score", json={**REWARD, "model": "classifier"})
    assert refused.status_code == 400
    rewards = http.post("/v1/rewards/score", json={**REWARD, "model": "judge"}).json()["data"]
    logits = logits_of(http, "judge", REWARD["texts"])
    np.testing.assert_allclose([entry["reward"] for entry in rewards], logits[:, 0], atol=1e-5)
    assert http.get("/v1/models/judge").json()["parent"] == "classifier"
    loading = http.post("/v1/models/load", json={"model": "demo:embed", "name": ["judge"]})
    assert (loading.status_code, loading.json()["error"]["param"]) == (400, "name")


REWARD = {"texts": ["w5 w6", "w7"]}
PAIR = {"query": "w5 w6", "documents": ["w7 w8", "w6"]}
ROUTES = [
    ("embedder", "/v1/embeddings", {"input": ["w5 w6"]}),
    ("embedder", "/v1/rerank", PAIR),
    ("embedder", "/v1/score", {"text_1": "w5", "text_2": ["w6", "w7"]}),
    ("embedder", "/similarity", {"inputs": {"source_sentence": "w5", "sentences": ["w6"]}}),
    ("embedder", "/embed_all", {"inputs": ["w5 w6"]}),
    ("embedder", "/pipeline/feature-extraction/{model}", {"inputs": "w5 w6"}),
    ("classifier", "/v1/classifications", {"input": ["w5 w6"]}),
    ("classifier", "/pooling", {"input": ["w5 w6"], "task": "classify"}),
    ("classifier", "/predict", {"inputs": "w5 w6"}),
    ("classifier", "/models/{model}", {"inputs": "w5 w6"}),
    ("decoder", "/v1/rewards/score", REWARD),
    ("decoder", "/v1/rerank", PAIR),
    ("mlm", "/v1/mlm", {"token_ids": [[2, 5, 4, 6, 3]]}),
    ("mlm", "/embed_sparse", {"inputs": ["w5 w6"]}),
    ("tagger", "/pooling", {"input": ["w5 w6"]}),
]


@pytest.mark.parametrize(("base", "path", "body"), ROUTES)
def test_every_route_takes_an_adapter(
    http: httpx2.Client, base: str, path: str, body: dict[str, Any]
) -> None:
    golden = read_golden_adapter("llama_sequence" if base == "decoder" else "bert_sequence")
    tensors = golden_tensors(golden)
    config: dict[str, Any] = golden["adapter_config"]
    if base in ("embedder", "mlm", "tagger"):
        config = {**config, "modules_to_save": None, "task_type": "FEATURE_EXTRACTION"}
        tensors = {name: tensor for name, tensor in tensors.items() if "lora" in name}
    if base == "decoder":
        # With one label it is a reward model and a cross-encoder.
        tensors["base_model.model.score.weight"] = tensors["base_model.model.score.weight"][:1]
    answers = []
    for number, scale in enumerate((1.0, -1.0)):
        scaled = {name: scale * tensor for name, tensor in tensors.items() if "lora_A" in name}
        content = encode_safetensors({**tensors, **scaled})
        made = upload(http, f"a{number}", base, {"adapter_config": config}, content)
        assert made.status_code == 200, made.text
        where = path.format(model=f"a{number}")
        answer = http.post(where, json=body if where != path else {**body, "model": f"a{number}"})
        assert answer.status_code == 200, answer.text
        answers.append(numbers_of(answer.json()))
    numbers, other = answers
    assert len(numbers) != len(other) or not np.allclose(numbers, other, rtol=1e-3)


def numbers_of(value: Any) -> list[float]:
    """Return all floats within a JSON value, in their order."""
    if isinstance(value, float):
        return [value]
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value)]
    return (
        [number for part in value for number in numbers_of(part)] if isinstance(value, list) else []
    )
