"""Embeddings over HTTP, by OpenAI's client, beside a model that generates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import mlx.core as mx
import numpy as np
import openai
import pytest

from mlx_parallm.client.tensors import encode_safetensors
from tests.decoder_folders import read_decoder, write_decoder_embedder
from tests.embedder_folder import MAX_LEN, write_embedder
from tests.server_process import ServerProcess

DEMO = Path(__file__).parents[2] / "mlx_parallm" / "demo_models" / "chat"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = write_embedder(tmp_path_factory.mktemp("embedder"))
    decoder = write_decoder_embedder(tmp_path_factory.mktemp("decoder"))
    names = [f"{folder}=embedder", f"{decoder}=decoder", f"{DEMO}=demo"]
    process = ServerProcess(
        *["--model", str(folder), str(decoder), str(DEMO), "--served-model-name", *names],
        *["--max-model-len", "24"],
    )
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.stop()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as connected:
        yield connected


def vectors(client: openai.OpenAI, inputs: Any, **more: Any) -> np.ndarray:
    answer = client.embeddings.create(model="embedder", input=inputs, **more)
    assert [entry.index for entry in answer.data] == list(range(len(answer.data)))
    return np.array([entry.embedding for entry in answer.data], dtype=np.float32)


def test_all_forms_of_input_give_the_same_vectors(client: openai.OpenAI) -> None:
    texts, ids = ["w5 w6", "w7", "w5 w6"], [[2, 5, 6, 3], [2, 7, 3], [2, 5, 6, 3]]
    embedded = vectors(client, texts)
    assert embedded.shape == (3, 32)
    np.testing.assert_allclose(np.linalg.norm(embedded, axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(embedded[0], embedded[2])
    np.testing.assert_allclose(vectors(client, ids), embedded, atol=1e-5)
    np.testing.assert_allclose(vectors(client, texts[1]), embedded[1:2], atol=1e-5)
    np.testing.assert_allclose(vectors(client, ids[1]), embedded[1:2], atol=1e-5)
    # The client asks for base64 by default.
    as_numbers = vectors(client, texts, encoding_format="float")
    np.testing.assert_allclose(as_numbers, embedded, atol=1e-6)


def test_a_decoder_gives_the_hidden_state_of_the_last_token(client: openai.OpenAI) -> None:
    golden = read_decoder("qwen3_model")
    answer = client.embeddings.create(model="decoder", input=golden["inputs"]["input_ids"])
    for entry, hidden in zip(answer.data, golden["hidden"], strict=True):
        expected = np.array(hidden[-1]) / np.linalg.norm(hidden[-1])
        np.testing.assert_allclose(entry.embedding, expected, atol=1e-4)
    texts = client.embeddings.create(model="decoder", input=["w5 w6", "w7"])
    ids = client.embeddings.create(model="decoder", input=[[5, 6, 2], [7, 2]])
    assert texts.usage.prompt_tokens == 5
    for entry, other in zip(texts.data, ids.data, strict=True):
        np.testing.assert_allclose(entry.embedding, other.embedding, atol=1e-5)


def test_adapters_of_others_or_by_an_encoders_name_are_refused(server: ServerProcess) -> None:
    config = json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2})
    path = "base_model.model.model.layers.0.self_attn.q_proj"
    shapes = {"lora_A": (2, 8), "lora_B": (8, 2)}
    tensors = {f"{path}.{part}.weight": mx.zeros(shape) for part, shape in shapes.items()}
    for name, model, field, why in [
        ("embedder", "demo", "name", "embedder"),
        ("mine", "embedder", "adapter", "no module"),
        ("mine", "nobody", "model", "nobody"),
    ]:
        answer = httpx2.post(
            f"{server.url}/v1/update_adapter_weights",
            params={"name": name, "model": model, "config": config},
            content=encode_safetensors(tensors),
            headers={"content-type": "application/octet-stream"},
        )
        assert answer.status_code == (404 if model == "nobody" else 400)
        assert (answer.json()["error"]["param"], why in answer.text) == (field, True)


def test_usage_counts_every_input(client: openai.OpenAI) -> None:
    usage = client.embeddings.create(model="embedder", input=["w5 w6", "w5 w6"]).usage
    assert (usage.prompt_tokens, usage.total_tokens) == (8, 8)


def test_many_clients_get_their_own_vectors_while_a_model_generates(
    client: openai.OpenAI,
) -> None:
    texts = [" ".join(f"w{5 + (n * k) % 60}" for k in range(1, 2 + n % 20)) for n in range(120)]
    alone = np.concatenate([vectors(client, text) for text in texts[:12]])
    stream = client.completions.create(
        model="demo",
        prompt="1, 2, 3,",
        max_tokens=14,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    with ThreadPoolExecutor(8) as pool:
        embedded = list(pool.map(lambda n: vectors(client, texts[n : n + 40]), range(0, 80, 10)))
    *_, last = stream
    assert last.usage is not None
    assert last.usage.completion_tokens == 14
    for begin, rows in zip(range(0, 80, 10), embedded, strict=True):
        assert rows.shape == (40, 32)
        if begin == 0:
            np.testing.assert_allclose(rows[:12], alone, atol=1e-5)
    np.testing.assert_allclose(embedded[0][10:40], embedded[1][:30], atol=1e-5)


def test_requests_of_one_id_are_all_answered(client: openai.OpenAI) -> None:
    def ask(number: int) -> np.ndarray:
        text = f"w{5 + number} w{6 + number}"
        return vectors(client, text, extra_body={"request_id": "mine"})

    with ThreadPoolExecutor(8) as pool:
        embedded = list(pool.map(ask, range(24)))
    assert len(np.unique(np.concatenate(embedded).round(5), axis=0)) == 24


def test_inputs_are_cut_only_where_that_is_asked(client: openai.OpenAI) -> None:
    text = "w9 " * 60
    with pytest.raises(openai.BadRequestError) as refusal:
        vectors(client, ["w5", text])
    assert refusal.value.code == "context_length_exceeded"
    assert "input 1 has 62" in refusal.value.message
    cut = vectors(client, text, extra_body={"truncate_prompt_tokens": -1})
    np.testing.assert_allclose(cut, vectors(client, "w9 " * (MAX_LEN - 2)), atol=1e-5)
    short = vectors(client, text, extra_body={"truncate_prompt_tokens": 5})
    np.testing.assert_allclose(short, vectors(client, "w9 w9 w9"), atol=1e-5)


# It reads lines of metrics without the label of an engine.
@pytest.mark.one_engine
def test_metrics_tell_what_was_computed_and_what_was_kept(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    def reading() -> list[float]:
        lines = httpx2.get(f"{server.url}/metrics").text.splitlines()
        names = ("inputs_total", "cache_hits_total", "tokens_total", "batch_inputs_sum")
        marks = [f'mlx_parallm:encoder_{name}{{model_name="embedder"}} ' for name in names]
        return [
            float(line.removeprefix(mark))
            for mark in marks
            for line in lines
            if line.startswith(mark)
        ]

    before = reading()
    first = vectors(client, ["w11 w12 w13 w14", "w11 w12 w13"])
    second = vectors(client, ["w11 w12 w13", "w11 w12 w13 w15"])
    np.testing.assert_array_equal(first[1], second[0])
    change = [now - then for now, then in zip(reading(), before, strict=True)]
    assert change == [4, 1, 6 + 5 + 6, 3]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [1.5]}, "input"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": ["w5"] * 8193}, "input"),
        ({}, "input"),
        ({"input": [[2, 100_000, 3]]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": "w5", "dimensions": 5}, "dimensions"),
        ({"input": "w5", "dimensions": 0}, "dimensions"),
        ({"input": "w5", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "w5", "truncate_prompt_tokens": 25}, "truncate_prompt_tokens"),
        ({"input": "w5", "model": "demo"}, "model"),
    ],
)
def test_bad_requests_name_the_field(
    server: ServerProcess, body: dict[str, Any], param: str
) -> None:
    answer = httpx2.post(f"{server.url}/v1/embeddings", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert httpx2.get(f"{server.url}/health").status_code == 200


def test_models_and_their_routes(server: ServerProcess, client: openai.OpenAI) -> None:
    assert {model.id for model in client.models.list()} == {"embedder", "decoder", "demo"}
    assert client.models.retrieve("embedder").id == "embedder"
    with pytest.raises(openai.BadRequestError, match="pooling model"):
        client.completions.create(model="embedder", prompt="w5")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="nothing", input="w5")
    # Without a name the first pooling model answers.
    answer = httpx2.post(f"{server.url}/embeddings", json={"input": "w5"}).json()
    assert answer["model"] == "embedder"


def test_a_batch_may_hold_embeddings(client: openai.OpenAI) -> None:
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": "embedder", "input": text},
        }
        for name, text in (("a", "w5 w6"), ("b", "w7"), ("c", "w9 " * 60))
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    uploaded = client.files.create(file=("lines.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/embeddings", completion_window="24h"
    )
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        batch = client.batches.retrieve(batch.id)
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)
    assert batch.output_file_id is not None
    answers = map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
    embedded = {
        answer["custom_id"]: answer["response"]["body"]["data"][0]["embedding"]
        for answer in answers
    }
    wanted = vectors(client, ["w5 w6", "w7"])
    np.testing.assert_allclose(np.array([embedded["a"], embedded["b"]]), wanted, atol=1e-5)
