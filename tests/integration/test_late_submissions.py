"""Nothing else uses MLX while a thread submits a step: shown by one that submits late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from benchmarks.make_seq2seq import make_seq2seq
from mlx_parallm.config import CacheConfig, SpeculativeConfig
from mlx_parallm.generation.kv_cache import fetches
from mlx_parallm.generation.kv_memory import free_bytes
from mlx_parallm.types.step import NoTracer
from mlx_parallm.worker.generation.model_runner import ModelRunner
from mlx_parallm.worker.lora import adapter_store
from tests.busy_run import SOURCE_POOL, BusyRun, run_busily
from tests.compiled_attention import CompiledAttention, OrderedAttention
from tests.hybrid_folder import write_hybrid
from tests.integration.test_parity_generate import (
    Session,
    loaded_model,
    random_prompt,
    shared_runner,
)
from tests.integration.test_speculation import generate, with_draft
from tests.late_dispatcher import SubmissionWatch
from tests.recorded_worker import MODULES


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> SubmissionWatch:
    """Let every worker submit late, and steps be built beside, as on CUDA."""
    watch = SubmissionWatch(monkeypatch)
    monkeypatch.setattr("mlx_parallm.worker.worker.dispatcher_of_device", watch.dispatcher)
    monkeypatch.setattr(CompiledAttention, "runs_in_order", True)
    monkeypatch.setattr(CompiledAttention, "settle", OrderedAttention.settle)
    return watch


@pytest.fixture
def num_beside(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that says of every step if it was built while one was submitted."""
    decided: list[bool] = []
    decide = ModelRunner._builds_beside

    def noted(*arguments: Any) -> bool:
        decided.append(decide(*arguments))
        return decided[-1]

    monkeypatch.setattr(ModelRunner, "_builds_beside", noted)
    return decided


def test_what_uses_mlx_before_a_submission_is_noted(watch: SubmissionWatch) -> None:
    dispatcher, x = watch.dispatcher(), mx.arange(3) + 1
    dispatcher.begin([x])
    mx.eval([])
    assert watch.misuses == []
    mx.eval(x)
    mx.clear_cache()
    assert watch.misuses == ["eval", "clear_cache"]
    dispatcher.join()
    mx.eval(x)
    assert len(watch.misuses) == 2


@pytest.mark.slow
def test_models_adapters_weights_images_and_moves(
    watch: SubmissionWatch, num_beside: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_store, "MODULES_AT_A_TIME", MODULES)
    run = run_busily(ahead=True)
    assert watch.misuses == []
    assert watch.num_submitted > 50
    assert any(num_beside)
    run.worker.close()


def test_plain_steps_are_built_before_the_one_before_is_submitted(
    watch: SubmissionWatch, num_beside: list[bool]
) -> None:
    run = BusyRun(ahead=True, is_alone=True)
    for length in (5, 9, 14):
        run.ask(str(length), length, temperature=0.0, max_tokens=30)
    run.step(8)
    # A load of another model asks for it while steps are submitted.
    free_bytes(run.worker)
    run.finish()
    assert watch.misuses == []
    assert sum(num_beside) > 15


@pytest.mark.parametrize(("logprobs", "is_plain"), [(None, True), (2, False)])
def test_results_are_read_beside_a_submission_if_they_are_copies(
    logprobs: int | None, is_plain: bool, watch: SubmissionWatch
) -> None:
    runner = shared_runner(
        "llama", CompiledAttention, dispatcher=watch.dispatcher, tracer=NoTracer()
    )
    session = Session(runner)
    session.add("first", random_prompt(5), logprobs=logprobs, max_tokens=30)
    for _ in range(4):
        session.step()
    batch = session.scheduler.schedule()
    assert batch is not None
    later = runner.submit(batch)
    assert watch.is_submitting
    assert session.in_flight is not None
    session.in_flight[1].wait()
    assert watch.is_submitting is is_plain
    later.wait()
    # Blocks are read and written while nothing is submitted.
    runner.submit(batch)
    runner.read_blocks([0]).wait()
    assert watch.misuses == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hybrid", "sources"])
def test_states_and_sources(
    kind: str, watch: SubmissionWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetches.UnitPace, "predict", lambda *_: None)
    monkeypatch.setattr(fetches, "LONGEST_READ_S", 1e6)
    if kind == "hybrid":
        cache = CacheConfig(kv_cache_bytes=3 << 20, block_size=4, kv_disk=tmp_path / "kv")
        run = BusyRun(ahead=True, cache=cache, generator=write_hybrid(tmp_path / "hybrid"))
        run.fill(90, 100, 90)
        run.close()
    else:
        folder = make_seq2seq(tmp_path / "t5", "tiny-t5")
        run = BusyRun(ahead=True, cache=SOURCE_POOL, generator=folder, is_alone=True)
        run.translate("stream", 40, n=2, seed=1, max_tokens=40)
        run.step(8)
        for number, length in enumerate((9, 30, 61)):
            run.translate(f"greedy {number}", length, temperature=0.0)
        run.finish()
    assert watch.misuses == []
    assert watch.num_submitted > 20


@pytest.mark.slow
def test_proposals_of_a_draft_model(watch: SubmissionWatch) -> None:
    vocab = loaded_model("llama").config["vocab_size"]
    runner = with_draft("llama", CompiledAttention, noise=0.0, vocab=vocab)
    runner._dispatcher = watch.dispatcher()
    config = SpeculativeConfig(
        method="draft_model", model="draft", disable_by_batch_size=8, num_speculative_tokens=4
    )
    generate("llama", config, runner=runner)
    assert watch.misuses == []
    assert watch.num_submitted > 5
