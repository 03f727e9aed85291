"""Anthropic's batches of messages by its own client, over an engine that tests play."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from anthropic.types.messages import MessageBatch

from mlx_parallm.config import EngineConfig, SchedulerConfig
from mlx_parallm.server_config import ServerConfig
from tests.batch_gate import POLL_S, Gate
from tests.fake_engine import FakeEngine, serve_fake, write

KEYS = {"x-api-key": "one"}


def served(folder: Path, engine: FakeEngine | None = None) -> Any:
    engine = engine or FakeEngine()
    engine.engine_config = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=8))
    config = ServerConfig(data_dir=str(folder), api_keys=("one", "two"))
    return serve_fake(engine, config, max_waiting=40)


def client_of(url: str, key: str = "one") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def url(engine: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("data"), engine) as url:
        yield url


@pytest.fixture
def client(engine: FakeEngine, url: str) -> Iterator[anthropic.Anthropic]:
    engine.script = write("hello")
    with client_of(url) as client:
        yield client


def asking(custom_id: str, **params: Any) -> Any:
    fields = {"model": "alias", "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]}
    return {"custom_id": custom_id, "params": fields | params}


def until(
    client: anthropic.Anthropic, batch: MessageBatch, is_so: Callable[[MessageBatch], bool]
) -> MessageBatch:
    while not is_so(batch):
        time.sleep(POLL_S)
        batch = client.messages.batches.retrieve(batch.id)
    return batch


def has_ended(batch: MessageBatch) -> bool:
    return batch.processing_status == "ended"


def counts_of(batch: MessageBatch) -> dict[str, Any]:
    return {name: count for name, count in batch.request_counts.to_dict().items() if count}


def results_of(client: anthropic.Anthropic, batch: MessageBatch) -> dict[str, Any]:
    return {each.custom_id: each.result for each in client.messages.batches.results(batch.id)}


def test_a_batch_is_answered(client: anthropic.Anthropic) -> None:
    created = client.messages.batches.create(
        requests=[asking("a"), asking("bad", max_tokens=-1), asking("b", system="be brief")]
    )
    assert created.type == "message_batch"
    assert (created.processing_status, created.results_url) == ("in_progress", None)
    assert counts_of(created) == {"processing": 3}
    assert (created.expires_at - created.created_at).total_seconds() == 24 * 3600
    batch = until(client, created, has_ended)
    assert counts_of(batch) == {"succeeded": 2, "errored": 1}
    assert batch.ended_at is not None
    assert batch.results_url is not None
    results = results_of(client, batch)
    assert results["a"].type == results["b"].type == "succeeded"
    message = results["a"].message
    assert message.content[0].text == "hello"
    assert (message.stop_reason, message.usage.service_tier) == ("end_turn", "batch")
    assert results["bad"].type == "errored"
    assert results["bad"].error.error.type == "invalid_request_error"
    assert "max_tokens" in results["bad"].error.error.message


def test_a_batch_is_cancelled_and_deleted(engine: FakeEngine, client: anthropic.Anthropic) -> None:
    gate = Gate()
    engine.script = gate.script
    batches = client.messages.batches
    batch = batches.create(requests=[asking(f"r{i}") for i in range(9)])
    with pytest.raises(anthropic.BadRequestError, match="cancel it first"):
        batches.delete(batch.id)
    with pytest.raises(anthropic.AnthropicError, match="No `results_url`"):
        batches.results(batch.id)
    cancelled = batches.cancel(batch.id)
    assert cancelled.processing_status in ("canceling", "ended")
    ended = until(client, cancelled, has_ended)
    assert ended.cancel_initiated_at is not None
    assert counts_of(ended) == {"canceled": 9}
    assert {result.type for result in results_of(client, ended).values()} == {"canceled"}
    with pytest.raises(anthropic.BadRequestError, match="cannot be cancelled"):
        batches.cancel(batch.id)
    deleted = batches.delete(batch.id)
    assert (deleted.id, deleted.type) == (batch.id, "message_batch_deleted")
    for call in (batches.retrieve, batches.results, batches.cancel, batches.delete):
        with pytest.raises(anthropic.NotFoundError):
            call(batch.id)


def test_pages_go_both_ways_and_have_no_batches_of_openais_form(
    client: anthropic.Anthropic, url: str
) -> None:
    with client_of(url, "two") as other, openai.OpenAI(base_url=f"{url}/v1", api_key="two") as ai:
        made = [other.messages.batches.create(requests=[asking("a")]).id for _ in range(5)][::-1]
        pages = other.messages.batches.list(limit=2)
        assert [batch.id for batch in pages.data] == made[:2]
        assert pages.has_more
        assert [batch.id for batch in pages] == made
        before = other.messages.batches.list(limit=2, before_id=made[3])
        assert [batch.id for batch in before.data] == made[1:3]
        assert before.has_more
        assert other.messages.batches.list(before_id=made[0]).data == []
        assert list(ai.batches.list()) == []
        with pytest.raises(openai.NotFoundError):
            ai.batches.retrieve(made[0])
        for batch_id in made:
            until(other, other.messages.batches.retrieve(batch_id), has_ended)
        files = {file.filename for file in ai.files.list()}
        assert "message_batch.jsonl" in files
    # Every key sees its own.
    assert made[0] not in [batch.id for batch in client.messages.batches.list()]
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(made[0])


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({}, "requests"),
        ({"requests": []}, "requests"),
        ({"requests": [7]}, "requests.0"),
        ({"requests": [asking("a b")]}, "requests.0.custom_id"),
        ({"requests": [asking("a" * 65)]}, "requests.0.custom_id"),
        ({"requests": [asking("")]}, "requests.0.custom_id"),
        ({"requests": [asking("a\n")]}, "requests.0.custom_id"),
        ({"requests": [asking("a"), asking("b"), asking("a")]}, "requests.0.custom_id"),
        ({"requests": [{"custom_id": "a"}]}, "requests.0.params"),
        ({"requests": [asking("a"), asking("b", stream=True)]}, "requests.1.params.stream"),
    ],
)
def test_a_bad_batch_is_named(url: str, body: Any, word: str) -> None:
    response = httpx2.post(f"{url}/v1/messages/batches", json=body, headers=KEYS)
    assert response.status_code == 400, response.text
    error = response.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert word in error["error"]["message"]


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "after_id=batch_1", "before_id=x"])
def test_a_bad_page_is_refused(url: str, query: str) -> None:
    response = httpx2.get(f"{url}/v1/messages/batches?{query}", headers=KEYS)
    assert response.status_code == 400
    assert response.json()["type"] == "error"


def test_a_batch_goes_on_after_a_restart(tmp_path: Path) -> None:
    gate = Gate()
    engine = FakeEngine()
    engine.script = gate.script
    with served(tmp_path, engine) as url, client_of(url) as client:
        batch = client.messages.batches.create(requests=[asking("a"), asking("b")])
    with served(tmp_path) as url, client_of(url) as client:
        batch = until(client, client.messages.batches.retrieve(batch.id), has_ended)
        assert sorted(results_of(client, batch)) == ["a", "b"]
        assert counts_of(batch) == {"succeeded": 2}
