"""The line about the load: what it says, and when."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any, cast

import pytest

from mlx_parallm.api.control.server.load_log import INTERVAL_S, LoadLog, LoadSample
from mlx_parallm.serving.interface import EngineClient
from mlx_parallm.types.errors import EngineDeadError


def metrics(running: int = 0, waiting: int = 0, **more: float) -> str:
    """Return metrics of two engines, the second of which has nothing."""
    values = {
        "vllm:num_requests_running": running,
        "vllm:num_requests_waiting": waiting,
        "vllm:prompt_tokens_total": more.get("prompt", 0),
        "vllm:generation_tokens_total": more.get("generated", 0),
        "vllm:prefix_cache_queries_total": more.get("queries", 0),
        "vllm:prefix_cache_hits_total": more.get("hits", 0),
        "vllm:kv_cache_usage_perc": more.get("kv", 0),
        "vllm:external_prefix_cache_hits_total": more.get("stored", 0),
    }
    lines = [f'{name}{{engine="0",model_name="a b"}} {value}' for name, value in values.items()]
    idle = [f'{name}{{engine="1",model_name="a b"}} 0.0' for name in values]
    return "\n".join(["# HELP vllm:x Text.", *lines, *idle, ""])


def test_a_line_has_the_rates_since_the_line_before() -> None:
    before = LoadSample.of(metrics(prompt=100, generated=50, queries=100, hits=10), 5.0)
    sample = metrics(3, 2, prompt=300, generated=90, queries=300, hits=160, kv=0.25)
    assert LoadSample.of(sample, 15.0).line(before) == {
        "running": 3,
        "waiting": 2,
        "prompt_tokens_per_s": 20.0,
        "generated_tokens_per_s": 4.0,
        "kv_used": 0.25,
        "prefix_hits": 0.75,
    }


def test_what_came_from_stores_counts_as_found_too() -> None:
    before = LoadSample.of(metrics(queries=100, hits=10, stored=20), 5.0)
    line = LoadSample.of(metrics(queries=300, hits=60, stored=120), 15.0).line(before)
    assert (line["prefix_hits"], line["stored_hits"]) == (0.75, 0.5)


class ScriptedMetrics:
    """Answers one text after the other; None is an engine that is gone."""

    def __init__(self, *texts: str | None) -> None:
        self._texts: Iterator[str | None] = iter(texts)

    async def render_metrics(self) -> tuple[bytes, str]:
        text = next(self._texts)
        if text is None:
            raise EngineDeadError("It is gone.")
        return text.encode(), "text/plain"


async def test_it_is_logged_while_there_is_work_and_once_after(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "mlx_parallm.api.control.server.load_log")
    texts = [
        metrics(),
        metrics(1),
        metrics(0, 1),
        None,
        metrics(0, generated=9),
        metrics(0, generated=9),
    ]
    waits: list[float] = []
    ended = asyncio.Event()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) > len(texts):
            ended.set()
            await asyncio.Event().wait()

    log = LoadLog(cast("EngineClient", ScriptedMetrics(*texts)), sleep=sleep)
    log.start()
    await ended.wait()
    await log.stop()
    assert set(waits) == {INTERVAL_S}
    lines: list[Any] = [vars(record) for record in caplog.records]
    assert [(line["running"], line["waiting"]) for line in lines] == [(1, 0), (0, 1), (0, 0)]
