"""A run of three models in one worker that asks for every kind of op."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.adapters.formats import read_adapter
from mlx_parallm.adapters.safetensors import read_safetensors
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from mlx_parallm.demo_models.folders import DEMO_FOLDER, DEMO_FOLDERS, PREFIX
from mlx_parallm.engine.adapter_staging import AdapterStaging
from mlx_parallm.engine.build import build_models
from mlx_parallm.engine.live_weights import WeightsUpdate
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.engine.policies import AdapterUpload
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
from mlx_parallm.types.step import Moves, ScheduledBatch
from tests import adapter_files
from tests.recorded_worker import RecordingWorker, kinds_of

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


def fail_next_step(run: BusyRun) -> None:
    """Let a step name an adapter that was never loaded; its requests end with an error."""
    runner = run.generator._runner
    submit = runner.submit

    def broken(batch: Any) -> Any:
        return submit(replace(batch, adapters={1: "nothing"}))

    # Without what it keeps to send again, only the worker can notice.
    with patch.object(runner, "submit", broken), patch.object(runner, "_adapters", None):
        run.step(1)
