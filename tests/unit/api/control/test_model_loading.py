"""Requests that come while their model is loaded for the first time wait for it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np

from mlx_parallm.config import ModelConfig
from mlx_parallm.engine.answer_reader import AnswerReader
from mlx_parallm.engine.residency import ModelEntry
from mlx_parallm.engine.status import ModelStatus
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.types.pooling import PoolingEvent, PoolingInfo, PoolingResults, PoolRequest
from tests.fake_engine import FakeEngine, serve_fake

INFO = PoolingInfo(
    architecture="x", vocab_size=256, max_model_len=9, dims=2, dtype="float32", weight_bytes=1
)


class LoadingEncoders:
    """A pooling model whose load ends when a request waits for it."""

    def __init__(self, failure: str | None = None) -> None:
        self.failure = failure
        self.waited = 0
        self.is_loaded = threading.Event()

    @property
    def thread(self) -> LoadingEncoders:
        return self

    def statuses(self) -> list[ModelStatus]:
        tokenizer: Any = SimpleNamespace(cut=lambda ids, length: ids)
        model = PoolingModel(
            names=("new",),
            root="r",
            created=1,
            tokenizer=tokenizer,
            info=INFO,
            max_batch_tokens=64,
            max_waiting=100,
        )
        is_loaded = self.is_loaded.is_set()
        return [ModelEntry(ModelConfig(), ("new",), model if is_loaded else None).status()]

    async def wait(self, name: str, client: str = "") -> None:
        assert name == "new"
        self.waited += 1
        if self.failure is not None:
            raise ModelLoadError(self.failure)
        self.is_loaded.set()

    async def open_reader(self, request: PoolRequest) -> AnswerReader[PoolingResults]:
        results = [np.array([len(read.token_ids), 1.0], np.float32) for read in request.inputs]
        reader = AnswerReader[PoolingResults](request)
        answer = PoolingResults(results, [False] * len(results))
        reader.put(PoolingEvent(request_id=request.request_id, results=answer))
        return reader


def ask(encoders: LoadingEncoders) -> httpx2.Response:
    engine = FakeEngine()
    engine.pooling = encoders
    with serve_fake(engine) as url:
        body = {"model": "new", "input": [[1, 2, 3]], "encoding_format": "float"}
        return httpx2.post(f"{url}/v1/embeddings", json=body)


def test_a_request_waits_for_the_first_load() -> None:
    encoders = LoadingEncoders()
    answer = ask(encoders)
    assert answer.status_code == 200, answer.text
    assert answer.json()["data"][0]["embedding"] == [3.0, 1.0]
    assert encoders.waited == 1


def test_a_load_that_fails_is_told() -> None:
    answer = ask(LoadingEncoders("its file is broken"))
    assert answer.status_code == 500
    assert "its file is broken" in answer.json()["error"]["message"]
