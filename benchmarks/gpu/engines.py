"""An engine around a random model, and how fast it and mlx_lm's ``BatchGenerator`` decode."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from benchmarks.gpu.shapes import RandomModel
from mlx_parallm.config import CacheConfig, SchedulerConfig
from mlx_parallm.engine.engine import Engine
from mlx_parallm.engine.metrics import EngineMetrics, MetricFamilies
from mlx_parallm.kv_cache.manager import KVCacheManager
from mlx_parallm.outputs import TokenEvent
from mlx_parallm.request import GenerateRequest, SamplingParams
from mlx_parallm.runner.backend_choice import choose_backend
from mlx_parallm.runner.cache_layout import kv_shapes, probe_layout
from mlx_parallm.runner.memory import plan_kv, query_heads
from mlx_parallm.runner.model_runner import ModelRunner
from mlx_parallm.scheduler.scheduler import Scheduler

PREFILL_TOKENS = 4096


class NoText:
    """Stands for a tokenizer; detokenisation is not what is measured."""

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

    def detokenizer(self, *, skip_special_tokens: bool = True) -> NoText:
        return self

    def add(self, token_id: int) -> str:
        return "x"

    def flush(self) -> str:
        return ""


def make_engine(model: RandomModel, *, max_num_seqs: int, max_model_len: int) -> Engine:
    """An engine as ``engine.build`` makes it, with KV for ``max_num_seqs`` full sequences."""
    loaded, layouts = model.loaded, probe_layout(model.model)
    cache = CacheConfig()
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=PREFILL_TOKENS)
    backend = choose_backend(cache, kv_shapes(layouts), query_heads(loaded.config)).backend
    plan = plan_kv(layouts, loaded.config, cache, config, max_model_len, backend)
    runner = ModelRunner(loaded, layouts, plan, plan.wanted_blocks, backend)
    info = runner.info
    kv = KVCacheManager(info.num_blocks, info.block_size, enable_prefix_caching=not info.has_state)
    scheduler = Scheduler(config, kv, max_model_len=info.max_model_len, has_state=info.has_state)
    metrics = EngineMetrics(MetricFamilies(), "bench", info)
    return Engine(scheduler, runner, NoText(), metrics)


def random_prompts(model: RandomModel, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """One prompt of random ids per length."""
    source = random.Random(seed)
    return [[source.randrange(model.vocab_size) for _ in range(length)] for length in lengths]


class EngineLoad:
    """Requests that decode for ever in an engine, stepped by hand."""

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], **params: Any) -> None:
        asked: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, **params}
        self._engine = engine
        self._ids = [f"bench-{i}" for i in range(len(prompts))]
        for request_id, prompt in zip(self._ids, prompts, strict=True):
            engine.add(
                GenerateRequest(
                    request_id=request_id,
                    model="bench",
                    prompt_ids=tuple(prompt),
                    params=SamplingParams(**asked),
                )
            )

    def prefill(self) -> float:
        """Step until every request has a token; seconds it took."""
        started = time.perf_counter()
        waiting = set(self._ids)
        while waiting:
            events = self._engine.step() or []
            waiting -= {event.request_id for event in events if isinstance(event, TokenEvent)}
        return time.perf_counter() - started

    def decode(self, steps: int, warmup: int = 8) -> float:
        """Milliseconds of a step in which every request decodes one token."""
        for _ in range(warmup):
            self._engine.step()
        started, tokens = time.perf_counter(), 0
        for _ in range(steps):
            tokens += sum(isinstance(event, TokenEvent) for event in self._engine.step() or [])
        elapsed = time.perf_counter() - started
        if tokens != steps * len(self._ids):
            raise RuntimeError(f"{tokens} tokens in {steps} steps of {len(self._ids)} requests")
        return elapsed / steps * 1e3

    def end(self) -> None:
        """Abort every request and let the step in flight end."""
        for request_id in self._ids:
            self._engine.abort(request_id)
        while self._engine.has_work():
            self._engine.step()


def batch_generator_ms(
    model: RandomModel, prompts: Sequence[Sequence[int]], steps: int, warmup: int = 8
) -> float:
    """Milliseconds of a ``BatchGenerator`` step in which every prompt decodes one token."""
    batch = len(prompts)
    generator = BatchGenerator(
        model.model,
        max_tokens=10_000,
        completion_batch_size=batch,
        prefill_batch_size=min(batch, 8),
    )
    generator.insert([list(prompt) for prompt in prompts])
    while len(generator.next()[1]) < batch:
        pass
    for _ in range(warmup):
        generator.next()
    started, tokens = time.perf_counter(), 0
    for _ in range(steps):
        tokens += len(generator.next()[1])
    elapsed = time.perf_counter() - started
    if tokens != steps * batch:
        raise RuntimeError(f"{tokens} tokens in {steps} steps of {batch} prompts")
    del generator
    mx.clear_cache()
    return elapsed / steps * 1e3
