"""A generator, an embedder, a classifier and quantised encoders in one process."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import openai
from mlx.utils import tree_flatten

from mlx_parallm.models.loading import load_encoder
from tests.embedder_folder import write_embedder
from tests.encoder_folders import read_golden, write_golden
from tests.server_process import ServerProcess

DEMO = Path(__file__).parents[2] / "mlx_parallm" / "demo_models" / "chat"


def write_quantised(folder: Path, bits: int) -> Path:
    """``write_embedder``'s, quantised as MLX does it."""
    write_embedder(folder)
    model = load_encoder(folder).model

    def fits(_: str, module: Any) -> bool:
        return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0

    nn.quantize(model, group_size=32, bits=bits, class_predicate=fits)
    arrays: Any = tree_flatten(model.parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(arrays))
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": bits}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_classifier(folder: Path) -> Path:
    write_embedder(folder)
    return write_golden(folder, read_golden("bert_sequence"))


def test_all_of_them_at_once(tmp_path: Path) -> None:
    folders = {
        "whole": write_embedder(tmp_path / "whole"),
        "q8": write_quantised(tmp_path / "q8", 8),
        "q4": write_quantised(tmp_path / "q4", 4),
        "labels": write_classifier(tmp_path / "labels"),
        "demo": DEMO,
    }
    models = ["--model", *map(str, folders.values())]
    names = ["--served-model-name", *(f"{folder}={name}" for name, folder in folders.items())]
    server = ServerProcess(*models, *names)
    try:
        server.wait_until_ready()
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            check(server, client)
    finally:
        server.stop()


def check(server: ServerProcess, client: openai.OpenAI) -> None:
    texts = [" ".join(f"w{5 + (n * k) % 60}" for k in range(1, 3 + n)) for n in range(12)]

    def embed(model: str) -> np.ndarray:
        answer = client.embeddings.create(model=model, input=texts, encoding_format="float")
        return np.array([entry.embedding for entry in answer.data])

    stream = client.completions.create(
        model="demo",
        prompt="1, 2, 3,",
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    with ThreadPoolExecutor(4) as pool:
        embedded = pool.map(embed, ["whole", "q8", "q4"])
        labels = pool.submit(classify, server, texts)
        whole, q8, q4 = embedded
    *_, last = stream
    assert last.usage is not None
    assert last.usage.completion_tokens == 40
    # Quantising to 8 bits changes little, to 4 bits more.
    close, far = ((whole * quantised).sum(axis=1).min() for quantised in (q8, q4))
    assert close > 0.999
    assert close > far > 0.8
    assert len(labels.result()["data"]) == len(texts)
    memory = {card["id"]: card["memory"]["weights_bytes"] for card in models_of(server)}
    assert memory["q4"] < memory["q8"] < memory["whole"]


def classify(server: ServerProcess, texts: list[str]) -> dict[str, Any]:
    body = {"model": "labels", "input": texts}
    answer = httpx2.post(f"{server.url}/classify", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def models_of(server: ServerProcess) -> list[dict[str, Any]]:
    return httpx2.get(f"{server.url}/v1/models").json()["data"]
