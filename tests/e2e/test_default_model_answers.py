"""Answers of every route name the model that served, not the foreign name that it answered for."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import httpx2
import pytest

from mlx_parallm.api.app import SLICES, STORING_SLICES, examples_of
from mlx_parallm.api.http.openapi import Example
from mlx_parallm.config import EngineConfig, LoadingConfig, ModelConfig
from mlx_parallm.engine import directory
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.serving.async_engine import AsyncEngine
from scripts.example_requests import ExampleSender
from tests.fake_engine import FakeEngine, serve_fake

pytestmark = pytest.mark.slow

FOREIGN = "gpt-"
LATEST = ":latest"
MODELS = ("demo:mlm", "demo:sentiment", "demo:embed", "demo:reward", "demo:cartpole")
# An operator's route: nothing stands for a model whose weights are to change.
OPERATING = {"POST /v1/update_adapter_weights"}
ALL = examples_of(SLICES + STORING_SLICES)


def named(example: Example) -> str | None:
    """Return the model that an example's body and answer both name."""
    assert example.answer is not None
    body: Any = example.request.json
    answer: Any = example.answer.body
    is_named = isinstance(body, dict) and "model" in body and isinstance(answer, dict)
    return answer.get("model") if is_named else None


NAMING = [key for key, each in ALL.items() if named(each) is not None and key not in OPERATING]


def default_for(name: str, _: LoadingConfig) -> str | None:
    """Stand for any number of ``--default-model``: of each kind one."""
    is_foreign = name.startswith(FOREIGN)
    return name.removeprefix(FOREIGN).removesuffix(LATEST) if is_foreign else None


@contextmanager
def fake_server() -> Iterator[str]:
    models = (ModelConfig(), *(ModelConfig(path=path) for path in MODELS))
    engine = AsyncEngine(EngineConfig(models=models))
    engine.start()
    try:
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setattr(directory, "default_for", default_for)
            with serve_fake(cast("FakeEngine", engine), ServerConfig(data_dir=folder)) as url:
                yield url
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with fake_server() as url:
        yield url


@pytest.mark.parametrize("key", NAMING)
def test_an_answer_names_the_model_that_served(url: str, key: str) -> None:
    example = ALL[key]
    body: Any = example.request.json
    foreign = replace(example.request, json=body | {"model": FOREIGN + body["model"]})
    examples = {**ALL, key: replace(example, request=foreign)}
    with httpx2.Client(base_url=url, timeout=None) as client:
        answer = ExampleSender(client, examples, {}).send(key)
    assert answer.status == 200, answer.body
    expected = named(example)
    assert expected is not None
    assert cast("Any", answer.body)["model"] == expected.removesuffix(LATEST)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize("name", ["mlx-parallm-demo", "mlx-parallm-demo:latest"])
def test_an_answer_without_a_prompt_does_so_too(url: str, path: str, name: str) -> None:
    for requested, answered in ((name, name), (FOREIGN + name, "mlx-parallm-demo")):
        answer = httpx2.post(url + path, json={"model": requested})
        assert (answer.status_code, answer.json()["model"]) == (200, answered)
