"""An engine around a random model, mlx_lm's ``BatchGenerator`` beside it, and their step times.

Both are stepped by hand and give the milliseconds of every step.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from mlx_parallm.config import CacheConfig, SchedulerConfig, SpeculativeConfig
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.generation.assembly import speculative_for
from mlx_parallm.generation.device_runner import DeviceRunner
from mlx_parallm.generation.engine import GenerationEngine
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.kv_cache.snapshots import StateSnapshots
from mlx_parallm.generation.kv_cache.stores import BlockStore
from mlx_parallm.generation.kv_cache.tiers import Tiers
from mlx_parallm.generation.metrics import EngineMetrics
from mlx_parallm.generation.model import Tokenizer
from mlx_parallm.generation.scheduler.scheduler import Scheduler
from mlx_parallm.grammar.compiler import GrammarCompiler
from mlx_parallm.models.checkpoints.decoder_sizes import query_heads
from mlx_parallm.types.step import Runner, StepTracer
from mlx_parallm.worker.attention.backend_choice import choose_backend
from mlx_parallm.worker.device.dispatcher import dispatcher_of_device
from mlx_parallm.worker.device.properties import backend_name
from mlx_parallm.worker.generation.cache_layout import kv_shapes, probe_layout
from mlx_parallm.worker.generation.draft_model import DraftModel
from mlx_parallm.worker.generation.load.memory import plan_kv
from mlx_parallm.worker.generation.load.runner import make_draft, make_runner
from mlx_parallm.worker.generation.model_runner import ModelRunner
from mlx_parallm.worker.generation.warm_up import WarmUp
from mlx_parallm.worker.ops import (
    Op,
    Pending,
    ReadBlocks,
    ReadStates,
    Step,
    WriteBlocks,
    WriteStates,
    at_once,
)
from tests.builders.random_models import RandomModel, flatten

#: ``STEP_TOKENS``: the token budget of a step.
STEP_TOKENS = 4096
#: ``DECODE_ROOM``: tokens that a request of a benchmark may decode.
DECODE_ROOM = 256


class MeasureError(Exception):
    """The run did not do what the benchmark wants to measure."""


class NoText:
    """A stand-in for a tokenizer, because detokenisation is not measured."""

    vocab_size = 0
    eos_ids: frozenset[int] = frozenset()
    has_chat_template = False
    think_markers = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        raise NotImplementedError

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        raise NotImplementedError

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        raise NotImplementedError

    def token_string(self, token_id: int) -> str:
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        raise NotImplementedError

    def detokenizer(self, **options: object) -> NoText:
        return self

    def add(self, token_id: int) -> str:
        return "x"

    def flush(self) -> str:
        return ""


class OneRunner:
    """The part of a worker that steps and moves of blocks need, with one model."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def begin(self, op: Op[Any]) -> Pending[Any]:
        """Begin an op."""
        match op:
            case Step():
                return self._runner.submit(op.batch)
            case ReadBlocks():
                return self._runner.read_blocks(op.blocks)
            case WriteBlocks():
                return self._runner.write_blocks(op.blocks, op.data)
            case ReadStates():
                return self._runner.read_states(op.slots)
            case WriteStates():
                return self._runner.write_states(op.slots, op.data)
            case _:
                raise NotImplementedError(op)


@dataclass(frozen=True, slots=True)
class BenchEngine:
    """An engine, and the parts of it that a benchmark looks at."""

    engine: GenerationEngine
    kv: KVCacheManager
    block_bytes: int

    @property
    def kv_bytes_held(self) -> int:
        """Bytes of the blocks that sequences hold."""
        return (self.kv.num_blocks - self.kv.num_free) * self.block_bytes

    @property
    def bytes_per_token(self) -> float:
        """KV of one token in all layers."""
        return self.block_bytes / self.kv.block_size

    def facts(self) -> dict[str, Any]:
        """Return how the model runs."""
        info = self.engine.info
        return {
            "path": info.path,
            "backend": info.attention_backend,
            "runs ahead": info.runs_ahead,
            "compiled": info.is_compiled,
            "blocks": info.num_blocks,
        }


def make_engine(
    model: RandomModel,
    *,
    max_num_seqs: int,
    max_model_len: int,
    kv_tokens: int | None = None,
    step_tokens: int = STEP_TOKENS,
    kv_cache_dtype: str = "auto",
    stall_ms: float | None = None,
    default_stall_ms: float | None = None,
    tracer: StepTracer | None = None,
    speculative: SpeculativeConfig | None = None,
    draft: RandomModel | None = None,
    grammars: GrammarCompiler | None = None,
    warms_up: bool = False,
    stores: Sequence[BlockStore] = (),
    host_bytes: int = 0,
    num_snapshots: int = 16,
) -> BenchEngine:
    """Return an engine as ``engine.build`` makes it, of a model with the loader's linear layers.

    Args:
        model: with the layers as mlx_lm made them.
        max_num_seqs: rows of a step.
        max_model_len: longest sequence.
        kv_tokens: tokens that the pool holds; None is ``max_num_seqs`` full sequences.
        step_tokens: the token budget of a step.
        kv_cache_dtype: the dtype of cached KV.
        stall_ms: see ``--max-decode-stall-ms``.
        default_stall_ms: see ``Scheduler``.
        tracer: notified of every step.
        speculative: its speculative decoding; None for none.
        draft: with which draft model.
        grammars: the compiler of its constrained samples' grammars.
        warms_up: see ``--warm-up``.
        stores: below its pool, nearest first.
        num_snapshots: states after prefixes that it keeps, of a model with a state.
        host_bytes: see ``--kv-host-bytes``.
    """
    if backend_name() == "cuda":
        flatten(model)
    loaded, layouts = model.loaded, probe_layout(model.model)
    cache = CacheConfig(kv_cache_dtype=kv_cache_dtype)
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=step_tokens,
        max_decode_stall_ms=stall_ms,
    )
    shapes, heads = kv_shapes(layouts), query_heads(loaded.config)
    backend = choose_backend(cache, shapes, heads, is_bounded=bool(stall_ms)).backend
    plan = plan_kv(layouts, loaded.config, cache, config, max_model_len, backend)
    num_blocks = plan.wanted_blocks if kv_tokens is None else -(-kv_tokens // plan.block_size)
    drafting = None if draft is None else _draft_model(draft, cache, num_blocks)
    dispatcher = dispatcher_of_device()
    runner = at_once(make_runner)(
        loaded,
        layouts,
        plan,
        num_blocks,
        backend,
        drafting,
        grammars=grammars,
        speculates=speculative is not None,
        tracer=tracer,
        dispatcher=dispatcher,
    )[0]
    runner.submits_beside = dispatcher.runs_beside
    info = runner.info
    tiers = None
    if host_bytes:
        runner.reserve_host_memory(host_bytes)
    if stores:
        tiers = Tiers(stores, block_bytes=plan.block_bytes, runs_ahead=info.runs_ahead)
    kv = KVCacheManager(
        info.num_blocks,
        info.block_size,
        enable_prefix_caching=not info.has_state or num_snapshots > 0,
        tiers=tiers,
        snapshots=StateSnapshots(max_num_seqs, num_snapshots, info.state_bytes)
        if info.has_state and num_snapshots
        else None,
        has_kv=plan.has_kv,
    )
    scheduler = Scheduler(
        config,
        kv,
        max_model_len=info.max_model_len,
        has_state=info.has_state,
        keeps_states=info.keeps_states,
        speculative=speculative_for(speculative, info, "bench"),
        pads=runner.prepares_shapes,
        default_stall_ms=default_stall_ms,
    )
    steps = None
    if warms_up:
        steps = WarmUp(
            runner, num_seqs=max_num_seqs, tokens=scheduler.token_budget, clock=time.monotonic
        )
    metrics = EngineMetrics(MetricFamilies(), "bench", info)
    engine = GenerationEngine(
        scheduler,
        _moving(runner) if stores else runner,
        cast(Tokenizer, NoText()),
        metrics,
        tiers=tiers,
        warm_up=steps,
        tracer=tracer,
    )
    if stores:
        # Random weights that stay the same: any name of them will do.
        engine.policies.base.identity = engine.policies.base.lasting.digest = "bench"
    while engine.prepare():
        pass
    return BenchEngine(engine, kv, plan.block_bytes)


class Layers:
    """The classes of a model's layers: mlx_lm's own, or as an engine made them.

    An engine gives some layers other classes. ``BatchGenerator`` is measured with its own.
    """

    def __init__(self, model: RandomModel) -> None:
        self._stock = [(module, type(module)) for module in model.model.modules()]
        self._changed = self._stock

    @contextmanager
    def stock(self) -> Iterator[None]:
        """Let the layers be mlx_lm's own while the block runs."""
        self._changed = [(module, type(module)) for module, _ in self._stock]
        self.restore()
        try:
            yield
        finally:
            for module, changed in self._changed:
                module.__class__ = changed

    def restore(self) -> None:
        """Make the layers mlx_lm's own."""
        for module, original in self._stock:
            module.__class__ = original


@contextmanager
def engine_for(model: RandomModel, **options: Any) -> Iterator[tuple[BenchEngine, Layers]]:
    """Yield an engine; afterwards its KV is freed and the model restored.

    ``options`` are those of ``make_engine``.
    """
    layers = Layers(model)
    # Collect earlier engines, whose KV would take the memory.
    gc.collect()
    # What the caller froze stays frozen: unfreezing would make every later collection scan it.
    was_frozen = gc.get_freeze_count() > 0
    mx.clear_cache()
    try:
        mx.reset_peak_memory()
        engine = make_engine(model, **options)
        # Like the engine thread, keep the garbage collector from interrupting steps.
        gc.collect()
        if not was_frozen:
            gc.freeze()
        yield engine, layers
    finally:
        if not was_frozen:
            gc.unfreeze()
        layers.restore()
        mx.clear_cache()


def _moving(runner: ModelRunner) -> Runner:
    """Return a runner that moves blocks too."""
    worker: Any = OneRunner(runner)
    plan: Any = SimpleNamespace(info=runner.info, prepares_shapes=runner.prepares_shapes)
    return DeviceRunner(worker, "bench", plan)


def _draft_model(model: RandomModel, cache: CacheConfig, num_blocks: int) -> DraftModel:
    if backend_name() == "cuda":
        flatten(model)
    loaded, layouts = model.loaded, probe_layout(model.model)
    choice = choose_backend(cache, kv_shapes(layouts), query_heads(loaded.config))
    return at_once(make_draft)(
        loaded, layouts, choice.backend, num_blocks=num_blocks, block_size=cache.block_size
    )[0]


def random_prompts(model: RandomModel, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Return one prompt of random ids per length."""
    source = random.Random(seed)
    return [[source.randrange(model.vocab_size) for _ in range(length)] for length in lengths]


class StockLoad:
    """Prompts that decode for ever in mlx_lm's ``BatchGenerator``, stepped by hand.

    ``prefill_batch`` is how many prompts it prefills at once; 8 is its default.
    """

    def __init__(
        self, model: RandomModel, prompts: Sequence[Sequence[int]], prefill_batch: int = 8
    ) -> None:
        self._batch = len(prompts)
        self._generator = BatchGenerator(
            model.model,
            max_tokens=1_000_000,
            completion_batch_size=self._batch,
            prefill_batch_size=min(self._batch, prefill_batch),
        )
        self._generator.insert([list(prompt) for prompt in prompts])

    def prefill(self) -> float:
        """Step until every prompt has a token; return the seconds."""
        started = time.perf_counter()
        while len(self._generator.next()[1]) < self._batch:
            pass
        return time.perf_counter() - started

    def decode(self, steps: int) -> list[float]:
        """Return the milliseconds of steps in which every prompt decodes one token."""
        times = []
        for _ in range(steps):
            started = time.perf_counter()
            count = len(self._generator.next()[1])
            times.append((time.perf_counter() - started) * 1e3)
            if count != self._batch:
                raise MeasureError(f"{count} tokens in a step of {self._batch} prompts")
        return times

    def end(self) -> None:
        """Free the KV."""
        self._generator.close()
        del self._generator
        mx.clear_cache()


def summary(times_ms: Sequence[float]) -> dict[str, float]:
    """Return median and mean of step times, for the record."""
    return {
        "median ms": round(statistics.median(times_ms), 4),
        "mean ms": round(statistics.fmean(times_ms), 4),
        "steps": len(times_ms),
    }
