"""Models with states and compiled decode steps give the tokens of each request alone."""

from __future__ import annotations

import logging
import random
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from mlx_parallm.config import CacheConfig, SchedulerConfig
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.cache_layout import probe_layout
from mlx_parallm.worker.generation.load.memory import plan_kv
from mlx_parallm.worker.generation.load.runner import make_runner
from mlx_parallm.worker.generation.model_runner import ModelRunner
from mlx_parallm.worker.ops import at_once
from mlx_parallm.worker.weights.loader import LoadedModel
from tests.compiled_attention import CompiledAttention
from tests.integration.test_parity_generate import (
    BLOCK_SIZE,
    Session,
    assert_same,
    build_model,
    loaded_model,
    random_prompt,
    shared_runner,
)

HYBRIDS = ("lfm2", "mamba2", "qwen3_next")


def counted(model: Any) -> list[tuple[int, ...]]:
    """Record the tokens' shape whenever the model's Python code runs."""
    calls: list[tuple[int, ...]] = []
    original = type(model)

    def call(self: Any, tokens: mx.array, *args: Any, **options: Any) -> mx.array:
        calls.append(tokens.shape)
        return original.__call__(self, tokens, *args, **options)

    model.__class__ = type(original.__name__, (original,), {"__call__": call})
    return calls


def runner_of(
    model: Any,
    config: dict[str, Any],
    block_size: int = BLOCK_SIZE,
    backend: type[ReferenceAttention] = CompiledAttention,
) -> ModelRunner:
    loaded = LoadedModel(model, config, loaded_model("lfm2").path, "float32", 0)
    layouts = probe_layout(model)
    attention = backend(block_size)
    scheduler = SchedulerConfig(max_num_seqs=8)
    plan = plan_kv(layouts, config, CacheConfig(block_size=block_size), scheduler, 96, attention)
    return at_once(make_runner)(loaded, layouts, plan, 96, attention)[0]


@pytest.mark.parametrize(
    "name", ["lfm2", "qwen3_next", pytest.param("mamba2", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("num_blocks", [96, 14], ids=["room", "preempted"])
def test_requests_that_come_and_go_are_as_each_alone(name: str, num_blocks: int) -> None:
    """Run greedy and sampled requests of different lengths, in chunks; some are aborted."""
    source = random.Random(num_blocks)
    session = Session(shared_runner(name, CompiledAttention), num_blocks=num_blocks, budget=16)
    calls: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {}
    for index in range(12):
        prompt = random_prompt(source.choice((1, 2, 9, 21)), seed=index)
        params = {
            "seed": index,
            "temperature": source.choice((0.0, 1.0)),
            "max_tokens": source.choice((1, 4, 9, 17)),
        }
        calls[f"r{index}"] = prompt, params
        session.add(f"r{index}", prompt, **params)
        for _ in range(source.randrange(3)):
            session.step()
        if index % 5 == 4:
            calls.pop(f"r{index - 1}")
            session.scheduler.abort(f"r{index - 1}")
    session.finish()
    if num_blocks == 14:
        assert session.scheduler.stats().num_preemptions > 0
    for request_id, (prompt, params) in calls.items():
        alone = Session(shared_runner(name, ReferenceAttention))
        alone.add("alone", prompt, **params)
        alone.finish()
        assert_same(session.result(request_id), alone.result("alone"))


@pytest.mark.parametrize("name", HYBRIDS)
def test_steps_of_a_number_of_rows_run_the_models_python_once(name: str) -> None:
    model, config = build_model(name)
    # All block tables have one block: another width would be traced again.
    runner = runner_of(model, config, 64)
    calls = counted(model)
    session = Session(runner)
    for index in range(5):
        session.add(f"r{index}", random_prompt(5 + index), max_tokens=16)
    while len(session.tokens) < 5:
        session.step()
    session.step()
    # Five rows are padded to eight.
    assert calls[-1] == (8, 1)
    del calls[:]
    for _ in range(5):
        session.step()
    assert calls == []
    for index in (0, 1, 3):
        session.scheduler.abort(f"r{index}")
    for _ in range(4):
        session.step()
    assert calls == [(2, 1)]
    session.finish()
    for index in (2, 4):
        alone = Session(shared_runner(name))
        alone.add("alone", random_prompt(5 + index), max_tokens=16)
        alone.finish()
        assert_same(session.result(f"r{index}"), alone.result("alone"))


def test_new_weights_are_heeded_and_memory_comes_back() -> None:
    model, config = build_model("qwen3_next")
    runner = runner_of(model, config)

    def run(runner: ModelRunner) -> Any:
        session = Session(runner)
        session.add("r", random_prompt(9), max_tokens=8)
        session.finish()
        return session.result("r")

    before = run(runner)
    assert_same(before, run(shared_runner("qwen3_next")))
    model.update(tree_map(lambda array: array * 1.25, model.parameters()))
    runner._path.forget_weights()
    after = run(runner)
    assert after.tokens != before.tokens
    runner._path.release_kv()
    runner._path.restore_kv()
    assert_same(run(runner), after)


def test_a_model_that_cannot_be_compiled_runs_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, config = build_model("lfm2")
    norm = model.model.embedding_norm
    original = type(norm)

    def call(self: Any, x: mx.array) -> mx.array:
        mx.eval(x)  # not while it is traced
        return original.__call__(self, x)

    norm.__class__ = type("Evaluated", (original,), {"__call__": call})
    with caplog.at_level(logging.DEBUG):
        runner = runner_of(model, config)
    assert runner.info.path == "split"
    assert not runner.info.is_compiled
    (line,) = [message for message in caplog.messages if "compiled" in message]
    assert "path split (state, compiled): difference None" in line
    session = Session(runner)
    session.add("r", random_prompt(9))
    session.finish()
    alone = Session(shared_runner("lfm2"))
    alone.add("r", random_prompt(9))
    alone.finish()
    assert_same(session.result("r"), alone.result("r"))


@pytest.mark.parametrize("backend", [ReferenceAttention, CompiledAttention])
def test_a_step_that_failed_leaves_nothing_for_the_next_one_to_compute(
    backend: type[ReferenceAttention], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = shared_runner("lfm2", backend)
    session = Session(runner)
    session.add("lost", random_prompt(5, seed=1))

    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    kept = len(runner._written())
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_sample", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            session.step()
    assert len(runner._written()) == kept
