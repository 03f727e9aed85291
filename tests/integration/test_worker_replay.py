"""The ops of a busy run give equal results in a worker of another process."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest

from benchmarks.make_seq2seq import make_seq2seq
from mlx_parallm.adapters.formats import read_adapter
from mlx_parallm.adapters.safetensors import read_safetensors
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.client.tensors import encode_safetensors
from mlx_parallm.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from mlx_parallm.demo_models.folders import DEMO_FOLDER, DEMO_FOLDERS, PREFIX
from mlx_parallm.engine.adapter_staging import AdapterStaging
from mlx_parallm.engine.build import build_models
from mlx_parallm.engine.live_weights import WeightsUpdate
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.engine.policies import AdapterUpload
from mlx_parallm.generation.kv_cache import fetches
from mlx_parallm.generation.scheduler.step_cost import StageCost
from mlx_parallm.grammar.spec import GrammarKind, GrammarSpec
from mlx_parallm.images.processor import host_array
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.grammar import Grammar
from mlx_parallm.types.model_input import (
    FEATURE,
    TOKEN_IDS,
    HostArray,
    InputKind,
    ModelInput,
    Span,
    source_of,
)
from mlx_parallm.types.pooling import PoolingInput, PoolRequest
from mlx_parallm.types.request import INPUT_TOKEN, SLEEP_TAGS, GenerateRequest, SamplingParams
from mlx_parallm.types.step import Moves, ScheduledBatch, StepOutput
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
from tests.hybrid_folder import write_hybrid
from tests.recorded_worker import (
    MODULES,
    Advanced,
    Begun,
    RecordingWorker,
    Waited,
    kinds_of,
    packed,
)

pytestmark = pytest.mark.slow

GENERATOR, EMBEDDER, SEER = "generator", "embedder", "seer"
NORM = "model.norm.weight"
#: ``NUM_FEATURES``: rows of an image of demo:see.
NUM_FEATURES = 64
#: ``IMAGE_COST``: of two images, it is a step's share of inputs.
IMAGE_COST = 6
#: ``STREAMS_SHARE``: cost of the stages that decode rows wait for, in place of what was measured.
STREAMS_SHARE = 2.0


#: The pool is so small that sequences are preempted.
POOL = CacheConfig(kv_cache_bytes=5 << 18, block_size=16)
SOURCE_POOL = CacheConfig(kv_cache_bytes=3 << 20, block_size=4)


class BusyRun:
    """Three models in one worker, driven step by step."""

    def __init__(
        self,
        *,
        ahead: bool,
        cache: CacheConfig = POOL,
        generator: Path = DEMO_FOLDER,
        is_alone: bool = False,
    ) -> None:
        self.worker = RecordingWorker()
        folders = {GENERATOR: generator}
        if not is_alone:
            folders |= {
                EMBEDDER: DEMO_FOLDERS[PREFIX + "embed"],
                SEER: DEMO_FOLDERS[PREFIX + "see"],
            }
        config = EngineConfig(
            models=tuple(
                ModelConfig(path=str(path), served_names=(name,)) for name, path in folders.items()
            ),
            cache=cache,
            scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=24),
            warm_up=False,
            enable_prompt_embeds=not is_alone,
        )
        built = build_models(
            kinds_of(ahead=ahead), config, MetricFamilies(), self.worker, lambda *_: None
        )
        self.engines: dict[str, Any] = {model.model.names[0]: model.engine for model in built}
        self.generator = self.engines[GENERATOR]
        self.is_woken = threading.Event()
        self.generator.wake_by(self.is_woken.set)

    def close(self) -> None:
        """End all models' stores."""
        for engine in self.engines.values():
            engine.close()

    def ask(self, name: str, length: int, *, adapter: str | None = None, **params: Any) -> None:
        """Queue a request with a prompt of this length."""
        prompt = tuple(50 + (7 * i + length) % 200 for i in range(length))
        self._submit(name, prompt, {"max_tokens": 24, **params}, adapter=adapter)

    def translate(
        self, name: str, length: int, *, prompt: tuple[int, ...] = (0,), **options: Any
    ) -> None:
        """Queue a request whose source has this length."""
        source = source_of([5 + (7 * i + length) % 200 for i in range(length)])
        adapter = options.pop("adapter", None)
        params = {"max_tokens": 12, **options}
        self._submit(name, prompt, params, adapter=adapter, inputs=(source,))

    def _submit(
        self, name: str, prompt: tuple[int, ...], params: dict[str, Any], **fields: Any
    ) -> None:
        settings = SamplingParams(**{"ignore_eos": True, **params})
        self.generator.submit(
            GenerateRequest(
                request_id=name, model=GENERATOR, prompt_ids=prompt, params=settings, **fields
            )
        )

    def ask_rows(self, name: str, length: int, **params: Any) -> None:
        """Queue a request whose prompt is rows in place of tokens."""
        width = self.generator.info.input_width
        rows = np.random.default_rng(length).normal(size=(length, width)).astype(np.float32)
        source = ModelInput(
            kind=InputKind.PROMPT_EMBEDS,
            content=name,
            arrays={"rows": HostArray("float32", rows.shape, rows.tobytes())},
            nbytes=rows.nbytes,
            span=Span(0, length),
        )
        self.generator.submit(
            GenerateRequest(
                request_id=name,
                model=GENERATOR,
                prompt_ids=(INPUT_TOKEN,) * length,
                params=SamplingParams(**{"max_tokens": 8, **params}),
                inputs=(source,),
            )
        )

    def ask_about(self, name: str, *seeds: int, **params: Any) -> None:
        """Queue a request with an image of each seed, between tokens."""
        ids, inputs = [5, 6, 7], list[ModelInput]()
        for seed in seeds:
            span = Span(len(ids), len(ids) + NUM_FEATURES)
            pixels = np.random.default_rng(seed).normal(size=(1, 3, 64, 64)).astype(np.float32)
            marks = np.full(NUM_FEATURES, FEATURE, np.int32)
            source = ModelInput(
                kind=InputKind.IMAGE,
                content=str(seed),
                arrays={"pixel_values": host_array(pixels), TOKEN_IDS: host_array(marks)},
                nbytes=NUM_FEATURES * 512,
                cost=IMAGE_COST,
                span=span,
                shape_key="64",
            )
            inputs.append(source)
            ids += [INPUT_TOKEN] * NUM_FEATURES + [8]
        request = GenerateRequest(
            request_id=name,
            model=SEER,
            prompt_ids=tuple(ids),
            params=SamplingParams(**{"max_tokens": 6, "ignore_eos": True, **params}),
            inputs=tuple(inputs),
        )
        self.engines[SEER].submit(request)

    def look(self) -> None:
        """Compute images together, in stages beside a stream, and for a request that ends."""
        seer = self.engines[SEER]
        self.ask_about("first", 1, seed=1)
        self.ask_about("second", 3, seed=2)
        while seer.has_work():
            seer.step()
        self.ask_about("both", 1, 2, seed=5)
        while seer.has_work():
            seer.step()
        self.ask_about("stream", max_tokens=40, seed=3)
        for _ in range(3):
            seer.step()
        self.ask_about("aborted", 5)
        for _ in range(3):
            seer.step()
        seer.abort("aborted")
        self.ask_about("beside", 6, 7, seed=4)
        while seer.has_work():
            seer.step()

    def step(self, count: int) -> None:
        for _ in range(count):
            self.generator.step()

    def finish(self) -> None:
        while self.generator.has_work():
            if self.generator.step() is None:
                self.is_woken.wait()
                self.is_woken.clear()

    def fill(self, *lengths: int) -> None:
        """Run prompts of these lengths, which fill the pool in turns, each with one beside it."""
        for length in lengths:
            self.ask(f"prompt {length}", length, n=2, seed=3, logprobs=2)
            self.step(8)
            self.ask(f"beside {length}", 9, temperature=0.0)
            self.finish()

    def load(
        self, name: str, seed: int, *, between: Callable[[], None], file: bytes | None = None
    ) -> None:
        """Load an adapter in parts, doing something between two of them."""
        tensors = read_safetensors(file or adapter_files.upload(seed), param="adapter")
        weights = read_adapter(adapter_files.CONFIG, tensors, param="adapter")
        upload = AdapterUpload(name=name, weights=weights, replaces=True)
        staging = AdapterStaging(upload, self.generator.policies)
        while staging.advance():
            between()
        staging.commit()
        staging.drop()

    def move(self) -> None:
        """Save blocks beside a prompt's steps, then swap them and save them again, alone."""
        self.ask("beside", 21, temperature=0.0)
        submit, pairs = self.generator._runner.submit, ((5, b"five"), (3, b"three"))

        def saving(batch: ScheduledBatch) -> Any:
            return submit(replace(batch, moves=replace(batch.moves, saved=pairs)))

        with patch.object(self.generator._runner, "submit", saving):
            self.finish()

        def save(*filled: tuple[int, bytes]) -> list[bytes]:
            moves = Moves(saved=pairs, filled=filled)
            output = submit(ScheduledBatch(step_id=-1, sequences=(), moves=moves)).wait()
            assert [content for content, _ in output.saved] == [b"five", b"three"]
            return [data for _, data in output.saved]

        five, three = save()
        assert five != three
        assert save((3, five), (5, three)) == [five, three]
        assert save() == [three, five]

    def update(self, scale: float, shape: tuple[int, ...] | None = None) -> None:
        norm = np.full(shape or self.norm_shape, scale, np.float32)
        self.generator.settle()
        self.generator.live.prepare(WeightsUpdate(tensors={NORM: HostTensor(norm)}))
        self.generator.live.commit()

    @property
    def norm_shape(self) -> tuple[int, ...]:
        loaded: Any = mx.load(str(DEMO_FOLDER / "model.safetensors"))
        return loaded[NORM].shape

    def embed(self, name: str, *lengths: int) -> None:
        inputs = tuple(PoolingInput(tuple(range(5, 5 + length))) for length in lengths)
        engine = self.engines[EMBEDDER]
        engine.submit(PoolRequest(request_id=name, model=EMBEDDER, inputs=inputs))
        # The time is so short that a batch takes several turns.
        while engine.has_work():
            engine.step(within_s=1e-9)


def run_busily(*, ahead: bool) -> BusyRun:
    run = BusyRun(ahead=ahead)
    run.ask("greedy", 40, temperature=0.0, logprobs=3, prompt_logprobs=2)
    run.ask("samples", 37, n=3, seed=5, top_p=0.9, repetition_penalty=1.2)
    grammars = run.generator.grammars
    shape = Grammar(text=grammars.compile(GrammarSpec(GrammarKind.REGEX, "[ab]{4,20}")))
    run.ask("shaped", 9, seed=1, grammar=shape, ignore_eos=False)
    run.ask_rows("rows", 29, seed=8)
    run.step(6)
    run.load("changing", 1, between=lambda: run.step(1))
    run.ask("adapted", 30, seed=2, adapter="changing")
    run.step(4)
    run.embed("vectors", 5, 30, 12)
    run.load("changing", 2, between=lambda: run.step(1))
    run.step(3)
    run.update(1.5)
    run.ask("newer", 45, seed=3)
    run.step(2)
    with pytest.raises(InvalidRequestError):
        run.update(1.0, shape=(3,))
    with pytest.raises(InvalidRequestError):
        run.update(float("nan"))
    run.step(2)
    run.generator.settle()
    fail_next_step(run)
    run.ask("after", 20, seed=4, adapter="changing")
    run.finish()
    run.generator.live.checksums()
    run.generator.live.sleep(1)
    run.generator.live.wake(SLEEP_TAGS)
    run.ask("awake", 33, temperature=0.0, adapter="changing")
    run.finish()
    run.move()
    run.generator.live.sleep(2)
    run.generator.live.wake(SLEEP_TAGS)
    run.ask("anew", 33, temperature=0.0)
    run.finish()
    run.generator.policies.unload("changing")
    with patch.object(StageCost, "tokens_within", lambda *_: STREAMS_SHARE):
        run.look()
    run.embed("more", 7)
    run.engines[EMBEDDER].release()
    return run


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


def fail_next_step(run: BusyRun) -> None:
    """Let a step name an adapter that was never loaded; its requests end with an error."""
    runner = run.generator._runner
    submit = runner.submit

    def broken(batch: Any) -> Any:
        return submit(replace(batch, adapters={1: "nothing"}))

    # Without what it keeps to send again, only the worker can notice.
    with patch.object(runner, "submit", broken), patch.object(runner, "_adapters", None):
        run.step(1)


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
