"""The ops of a busy run give equal results in a worker of another process."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.make_seq2seq import make_seq2seq
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.client.tensors import encode_safetensors
from mlx_parallm.config import CacheConfig
from mlx_parallm.engine.live_weights import WeightsUpdate
from mlx_parallm.generation.kv_cache import fetches
from mlx_parallm.generation.scheduler.step_cost import StageCost
from mlx_parallm.types.model_input import InputKind
from mlx_parallm.types.request import SLEEP_TAGS
from mlx_parallm.types.step import StepOutput
from mlx_parallm.worker.generation.load.plan import GenerationPlan
from mlx_parallm.worker.lora import adapter_store
from mlx_parallm.worker.ops import (
    ComputeInputs,
    ReadBlocks,
    ReadStates,
    StageAdapter,
    Step,
    WriteBlocks,
    WriteStates,
)
from tests import adapter_files
from tests.busy_run import SOURCE_POOL, STREAMS_SHARE, BusyRun, run_busily
from tests.hybrid_folder import write_hybrid
from tests.recorded_worker import MODULES, Advanced, Begun, RecordingWorker, Waited, packed

pytestmark = pytest.mark.slow


def assert_images_were_computed(ops: list[Any], records: list[Any]) -> None:
    """Assert that some were computed together, some in stages, and one in part only."""
    runs = [
        (number, op)
        for number, op in enumerate(ops)
        if isinstance(op, ComputeInputs) and op.kind is InputKind.IMAGE
    ]
    assert max(len(op.slots) for _, op in runs) > 1
    waited = {record.number for record in records if isinstance(record, Waited)}
    assert sum(number not in waited for number, _ in runs) == 1, "the aborted request's"
    places = {number: list[int]() for number, _ in runs}
    for place, record in enumerate(records):
        if isinstance(record, Advanced) and record.number in places:
            places[record.number].append(place)
    assert any(
        isinstance(records[place], Begun)
        for stages in places.values()
        for place in range(min(stages, default=0), max(stages, default=0))
    ), "no step ran between two stages"


@pytest.mark.parametrize("ahead", [False, True])
def test_ops_replayed_in_another_process_give_equal_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, ahead: bool
) -> None:
    monkeypatch.setattr(adapter_store, "MODULES_AT_A_TIME", MODULES)
    run = run_busily(ahead=ahead)
    records = run.worker.records
    assert run.generator.info.runs_ahead == run.generator.info.is_compiled == ahead
    assert_replayed(records, tmp_path, ahead=ahead)
    assert_was_busy(records, run)


def assert_replayed(records: list[Any], tmp_path: Path, *, ahead: bool) -> None:
    """Assert that a worker of another process gives what this one gave."""
    recorded, replayed = tmp_path / "recorded", tmp_path / "replayed"
    recorded.write_bytes(packed(records))
    # Equal results need the same BLAS.
    code = (
        "import sys\n"
        "from mlx_parallm.process_setup.device_process import prepare_device_process\n"
        "prepare_device_process()\n"
        "from tests.recorded_worker import main\n"
        "main(*sys.argv[1:])"
    )
    mode = "ahead" if ahead else "waiting"
    subprocess.run([sys.executable, "-c", code, recorded, replayed, mode], check=True)
    expected = [record.result for record in records if isinstance(record, Waited)]
    actual = pickle.loads(replayed.read_bytes())
    assert len(actual) == len(expected)
    for ours, others in zip(expected, actual, strict=True):
        assert_equal(ours, others)


@pytest.mark.parametrize("ahead", [False, True])
def test_moves_between_a_pool_and_a_store_are_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, ahead: bool
) -> None:
    monkeypatch.setattr(fetches.UnitPace, "predict", lambda *_: None)
    monkeypatch.setattr(fetches, "LONGEST_READ_S", 1e6)
    disk = CacheConfig(
        kv_cache_bytes=3 << 20, block_size=4, kv_disk=tmp_path / "kv", kv_disk_bytes=1 << 28
    )
    run = BusyRun(ahead=ahead, cache=disk)
    run.generator.live.begin_hashing()
    run.generator.live.contents.join()
    for _ in range(2):
        # Each prompt takes half of the pool.
        run.fill(90, 100, 110)
    run.close()
    records = run.worker.records
    ops = [pickle.loads(record.op) for record in records if isinstance(record, Begun)]
    num_read = sum(len(op.blocks) for op in ops if isinstance(op, ReadBlocks))
    num_written = sum(len(op.blocks) for op in ops if isinstance(op, WriteBlocks))
    assert num_read >= 22 + 25 + 27
    assert num_written >= 22
    assert_replayed(records, tmp_path, ahead=ahead)


@pytest.mark.parametrize("ahead", [False, True])
def test_moves_of_states_are_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, ahead: bool
) -> None:
    monkeypatch.setattr(fetches.UnitPace, "predict", lambda *_: None)
    monkeypatch.setattr(fetches, "LONGEST_READ_S", 1e6)
    disk = CacheConfig(kv_cache_bytes=3 << 20, block_size=4, kv_disk=tmp_path / "kv")
    run = BusyRun(ahead=ahead, cache=disk, generator=write_hybrid(tmp_path / "hybrid"))
    run.generator.live.begin_hashing()
    run.generator.live.contents.join()
    for _ in range(2):
        run.fill(90, 100, 110)
        run.generator._save_all()
        run.generator._scheduler.reset_prefix_cache(reset_running=False)
    run.close()
    records = run.worker.records
    ops = [pickle.loads(record.op) for record in records if isinstance(record, Begun)]
    assert sum(len(op.slots) for op in ops if isinstance(op, ReadStates)) >= 3
    assert sum(len(op.slots) for op in ops if isinstance(op, WriteStates)) >= 3
    assert_replayed(records, tmp_path, ahead=ahead)


@pytest.mark.parametrize("ahead", [False, True])
def test_runs_of_sources_are_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, ahead: bool
) -> None:
    monkeypatch.setattr(adapter_store, "MODULES_AT_A_TIME", MODULES)
    folder = make_seq2seq(tmp_path / "t5", "tiny-t5")
    run = BusyRun(ahead=ahead, cache=SOURCE_POOL, generator=folder, is_alone=True)
    for length in (3, 8, 5):
        run.translate(f"together {length}", length, temperature=0.0)
    run.finish()
    monkeypatch.setattr(StageCost, "tokens_within", lambda *_: STREAMS_SHARE)
    run.translate("stream", 40, n=2, seed=1, max_tokens=40, logprobs=2)
    run.step(8)
    # They are computed in stages beside it.
    for number, length in enumerate((9, 9, 30, 61, 17)):
        run.translate(
            f"greedy {number}", length, temperature=0.0, prompt=(0, *range(7, 7 + number))
        )
    run.step(3)
    run.translate("aborted", 70)
    run.step(2)
    run.generator.abort("aborted")
    run.load("halves", 1, between=lambda: run.step(1), file=adapter_of_both_halves(folder))
    for length in (40, 21):
        run.translate(f"adapted {length}", length, adapter="halves", seed=2)
    run.step(3)
    run.finish()
    run.generator.settle()
    norm = HostTensor(np.full(64, 1.5, np.float32))
    run.generator.live.prepare(WeightsUpdate(tensors={"encoder.final_layer_norm.weight": norm}))
    run.generator.live.commit()
    run.translate("newer", 40, seed=1, logprobs=2)
    run.translate("scored", 30, max_tokens=0, prompt_logprobs=1, prompt=(0, 8, 9, 10))
    run.finish()
    run.generator.live.sleep(1)
    run.generator.live.wake(SLEEP_TAGS)
    run.translate("awake", 40, seed=1, logprobs=2)
    run.finish()
    records = run.worker.records
    assert run.generator.info.runs_ahead == run.generator.info.is_compiled == ahead
    ops = [pickle.loads(record.op) for record in records if isinstance(record, Begun)]
    runs = [op for op in ops if isinstance(op, ComputeInputs)]
    assert len(runs) >= 8
    assert max(len(op.places) for op in runs) > 1
    assert any(place.adapter for op in runs for place in op.places)
    assert any(isinstance(record, Advanced) for record in records)
    assert_replayed(records, tmp_path, ahead=ahead)


def adapter_of_both_halves(folder: Path) -> bytes:
    """Return a LoRA of queries of the encoder and of the decoder's view of its output."""
    config, random = json.loads((folder / "config.json").read_text()), np.random.default_rng(1)
    dims, inner = config["d_model"], config["num_heads"] * config["d_kv"]
    made: dict[str, np.ndarray] = {}
    for path in (
        "encoder.block.0.layer.0.SelfAttention.q",
        "encoder.block.1.layer.0.SelfAttention.v",
        "decoder.block.0.layer.1.EncDecAttention.k",
        "decoder.block.1.layer.0.SelfAttention.v",
    ):
        rank = adapter_files.RANK
        made[f"{path}.lora_a"] = random.normal(0, 0.3, (dims, rank)).astype(np.float32)
        made[f"{path}.lora_b"] = random.normal(0, 0.3, (rank, inner)).astype(np.float32)
    return encode_safetensors(made)


def assert_equal(result: Any, other: Any) -> None:
    if isinstance(result, list):
        for ours, others in zip(result, other, strict=True):
            np.testing.assert_array_equal(ours, others)
    elif isinstance(result, GenerationPlan) and result.info is None:
        # The replayed load was given the choices that the first had yet to make.
        assert result == replace(other, choices=result.choices)
    else:
        assert result == other


def assert_was_busy(records: list[Any], run: BusyRun) -> None:
    """Assert that the run contained everything that the test is about."""
    ops = [pickle.loads(record.op) for record in records if isinstance(record, Begun)]
    names = {type(op).__name__ for op in ops}
    assert names >= {
        "Load",
        "Allocate",
        "Step",
        "ReadBlocks",
        "WriteBlocks",
        "ComputeInputs",
        "PoolBatch",
        "PutTensors",
        "DropTensors",
        "AddAdapter",
        "StageAdapter",
        "DropAdapter",
        "PrepareWeights",
        "CommitWeights",
        "Sleep",
        "Wake",
        "Checksums",
        "Unload",
    }
    assert_images_were_computed(ops, records)
    results = [record.result for record in records if isinstance(record, Waited)]
    tokens = sum(len(result.tokens) for result in results if isinstance(result, StepOutput))
    assert tokens > 150
    assert KeyError in results
    assert sum(isinstance(result, str) for result in results) == 2
    assert run.generator.stats.num_preemptions > 0
    assert any(op.part > 0 for op in ops if isinstance(op, StageAdapter))
    begun = [isinstance(op, Step) for op in ops]
    assert sum(begun) > 50


def test_an_op_that_names_no_model_of_the_worker_is_an_error() -> None:
    with pytest.raises(KeyError):
        RecordingWorker().execute(StageAdapter(model="nothing", content="c", slot=1, part=0))
