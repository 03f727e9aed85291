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
from mlx_parallm.runner.backend_choice import choose_backend
from mlx_parallm.runner.cache_layout import kv_shapes, probe_layout
from mlx_parallm.runner.memory import plan_kv, query_heads
from mlx_parallm.runner.model_runner import ModelRunner
from mlx_parallm.scheduler.scheduler import Scheduler
from mlx_parallm.tracing import StepTracer

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


def make_engine(
    model: RandomModel,
    *,
    max_num_seqs: int,
    max_model_len: int,
    kv_tokens: int | None = None,
    stall_ms: float | None = None,
    tracer: StepTracer | None = None,
) -> Engine:
    """An engine as ``engine.build`` makes it, with KV for ``kv_tokens``.

    Without them it has KV for ``max_num_seqs`` full sequences.
    """
    loaded, layouts = model.loaded, probe_layout(model.model)
    cache = CacheConfig()
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=PREFILL_TOKENS,
        max_decode_stall_ms=stall_ms,
    )
    backend = choose_backend(cache, kv_shapes(layouts), query_heads(loaded.config)).backend
    plan = plan_kv(layouts, loaded.config, cache, config, max_model_len, backend)
    num_blocks = plan.wanted_blocks
    if kv_tokens is not None:
        num_blocks = min(num_blocks, -(-kv_tokens // plan.block_size))
    runner = ModelRunner(loaded, layouts, plan, num_blocks, backend, tracer=tracer)
    info = runner.info
    kv = KVCacheManager(info.num_blocks, info.block_size, enable_prefix_caching=not info.has_state)
    scheduler = Scheduler(config, kv, max_model_len=info.max_model_len, has_state=info.has_state)
    metrics = EngineMetrics(MetricFamilies(), "bench", info)
    return Engine(scheduler, runner, NoText(), metrics, tracer=tracer)


def random_prompts(model: RandomModel, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """One prompt of random ids per length."""
    source = random.Random(seed)
    return [[source.randrange(model.vocab_size) for _ in range(length)] for length in lengths]


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
