"""After the warm-up no decode step is traced, and answers are the same."""

from __future__ import annotations

import logging
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_parallm.config import EngineConfig, SchedulerConfig
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.generation import assembly, build
from mlx_parallm.serving.build import build_engines
from mlx_parallm.types.step import ScheduledBatch
from mlx_parallm.worker.attention.backend_choice import BackendChoice, choose_backend
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.load.loading import GenerationLoader
from mlx_parallm.worker.generation.model_runner import ModelRunner
from mlx_parallm.worker.generation.warm_up import WarmUp
from mlx_parallm.worker.worker import Worker
from tests.integration.test_compiled_states import counted, runner_of
from tests.integration.test_parity_generate import (
    Session,
    assert_same,
    build_model,
    random_prompt,
    shared_runner,
)

NUM_SEQS, TOKENS = 8, 96
BLOCK = 3


def run(runner: ModelRunner, *, step_s: float = 0.0) -> int:
    """Warm up with a clock that advances at every reading; return the number of steps."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += step_s
        return now

    warm_up = WarmUp(runner, num_seqs=NUM_SEQS, tokens=TOKENS, clock=clock)
    count = 0
    while not warm_up.is_done:
        warm_up.run_next(BLOCK)
        count += 1
    return count


def test_no_decode_step_is_traced_after_it() -> None:
    model, config = build_model("llama")
    runner = runner_of(model, config, 4)
    calls = counted(model)
    assert run(runner) > 0
    assert {(1, 1), (2, 1), (4, 1), (8, 1), (TOKENS, 1)} <= set(calls)
    session = Session(runner, budget=TOKENS)
    for index in range(NUM_SEQS):
        session.add(f"r{index}", random_prompt(9 + index), max_tokens=4 + 3 * index)
    while len(session.tokens) < NUM_SEQS:
        session.step()
    del calls[:]
    session.finish()
    # Tables grew from 3 blocks to 11, and rows became fewer.
    assert calls == []
    for index in range(NUM_SEQS):
        alone = Session(shared_runner("llama"))
        alone.add("alone", random_prompt(9 + index), max_tokens=4 + 3 * index)
        alone.finish()
        assert_same(session.result(f"r{index}"), alone.result("alone"))


def test_nothing_runs_where_nothing_is_prepared() -> None:
    model, config = build_model("llama")
    runner = runner_of(model, config, 4, ReferenceAttention)
    calls = counted(model)
    assert run(runner) == 0
    assert calls == []


def test_it_ends_when_it_took_long_enough(caplog: pytest.LogCaptureFixture) -> None:
    model, config = build_model("llama")
    runner = runner_of(model, config, 4)
    with caplog.at_level(logging.INFO):
        assert run(runner, step_s=7.0) == 3
    assert re.search(r"3 of \d{2,} shapes prepared in 21\.0 s", caplog.text)


def test_steps_use_the_block_that_they_are_given_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, config = build_model("llama")
    runner = runner_of(model, config, 4)
    batches: list[ScheduledBatch] = []

    def record(batch: ScheduledBatch) -> Any:
        batches.append(batch)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(runner, "submit", record)
    count = run(runner)
    assert len(batches) == count
    tables = [sequence.block_table for batch in batches for sequence in batch.sequences]
    assert {block for table in tables for block in table} == {BLOCK}
    assert len({len(table) for table in tables}) > 1


@pytest.mark.parametrize("stall_ms", [None, 20.0])
@pytest.mark.parametrize("warms_up", [False, True])
def test_the_configuration_says_so(
    monkeypatch: pytest.MonkeyPatch, stall_ms: float | None, *, warms_up: bool
) -> None:
    """Check that a setting decides on warming up, and another on bounding steps."""
    shapes: list[tuple[int, int]] = []
    bounded: list[bool] = []

    def record(runner: ModelRunner, *, num_seqs: int, tokens: int, **others: Any) -> WarmUp:
        shapes.append((num_seqs, tokens))
        return WarmUp(runner, num_seqs=num_seqs, tokens=tokens, **others)

    def choose(*args: Any, is_bounded: bool, **others: Any) -> BackendChoice:
        bounded.append(is_bounded)
        return choose_backend(*args, is_bounded=is_bounded, **others)

    monkeypatch.setattr(assembly, "WarmUp", record)
    monkeypatch.setattr(build, "GenerationLoader", partial(GenerationLoader, choose))
    scheduler = SchedulerConfig(max_num_seqs=6, max_decode_stall_ms=stall_ms)
    config = EngineConfig(scheduler=scheduler, warm_up=warms_up)
    build_engines(config, MetricFamilies(), Worker(), lambda _text, _share: None)
    assert shapes == [(6, 1024)] * warms_up
    assert bounded == [stall_ms is not None]
