"""Snapshots in a real engine take no more memory than their limit, and none after sleep."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_parallm.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from mlx_parallm.engine.control import PauseMode
from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.generation.kv_cache.snapshots import SnapshotStats
from mlx_parallm.serving.async_engine import AsyncEngine
from mlx_parallm.types.events import ErrorEvent, PromptEvent, TokenEvent
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.worker.generation.state_store import StateStore
from tests.builders.architectures.configs import VOCAB_SIZE, config_of
from tests.builders.architectures.trial import build
from tests.decoder_folders import write_words
from tests.engine_action import Do

NAME = "model"
NUM_SEQS = 4
NUM_SNAPSHOTS = 6
#: STATE_BYTES of a sequence of the tiny qwen3_next.
STATE_BYTES = 20_992
# GROWTH_BYTES: arrays that steps of other shapes leave.
GROWTH_BYTES = 1 << 20


def write_model(folder: Path, architecture: str) -> Path:
    """Write a tiny random model with a tokenizer of words; return its folder."""
    config = config_of(architecture)
    parameters: Any = tree_flatten(build(config).parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(parameters))
    (folder / "config.json").write_text(json.dumps(config))
    write_words(folder, VOCAB_SIZE)
    return folder


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(
        EngineConfig(
            models=(ModelConfig(path=str(folder), served_names=(NAME,), dtype="float32"),),
            cache=CacheConfig(
                block_size=4,
                kv_cache_bytes=1 << 20,
                state_cache_bytes=NUM_SNAPSHOTS * STATE_BYTES + 1,
                state_snapshot_tokens=16,
            ),
            scheduler=SchedulerConfig(max_num_seqs=NUM_SEQS, max_num_batched_tokens=24),
            warm_up=False,
        )
    )
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def store_of(loop: Any) -> StateStore:
    """Return the states of the model."""
    runner: Any = loop.engines[NAME]._runner
    return runner._worker._models[NAME]._runner._path._states


def snapshots_of(loop: Any) -> tuple[SnapshotStats, int, int]:
    """Return what is known of snapshots, and how many slots and bytes their states have."""
    store: Any = store_of(loop)
    rows = [batch for slot, (batch, _) in store._rows.items() if slot >= NUM_SEQS]
    arrays = [array for batch in rows for entries in batch.states for array in entries]
    stats = loop.engines[NAME].stats.snapshots
    return stats, len(rows), sum(array.nbytes for array in arrays)


async def ask(engine: AsyncEngine, number: int, prompt: tuple[int, ...]) -> tuple[int, list[int]]:
    """Return the cached tokens and the answer."""
    request = GenerateRequest(
        request_id=str(number),
        model=NAME,
        prompt_ids=prompt,
        params=SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
    )
    handle = await GENERATION.client(engine).submit(request)
    cached, tokens = 0, list[int]()
    async for event in handle.events:
        assert not isinstance(event, ErrorEvent)
        if isinstance(event, PromptEvent):
            cached = event.num_cached_tokens
        elif isinstance(event, TokenEvent):
            tokens += event.token_ids
    return cached, tokens


def prompts(count: int) -> list[tuple[int, ...]]:
    """Return prompts that begin alike, at few lengths."""
    source = Random(0)
    texts = [tuple(source.randrange(5, VOCAB_SIZE) for _ in range(60)) for _ in range(5)]
    return [
        (
            *source.choice(texts)[: source.choice((0, 16, 33, 60))],
            *(source.randrange(5, VOCAB_SIZE) for _ in range(source.randrange(1, 20))),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
async def test_snapshots_stay_within_their_limit(tmp_path: Path, count: int) -> None:
    folder = write_model(tmp_path, "qwen3_next")
    before = active_bytes()
    async with served(folder) as engine:
        (info,) = [each.info for each in GENERATION.client(engine).models()]
        assert info.state_bytes == STATE_BYTES
        num_cached, num_evicted, sizes = 0, 0, list[int]()
        texts = prompts(count)
        for first in range(0, count, 20):
            part = enumerate(texts[first : first + 20], first)
            answers = await asyncio.gather(*(ask(engine, *each) for each in part))
            num_cached += sum(cached > 0 for cached, _ in answers)
            stats, num_slots, num_bytes = await engine.call(Do(snapshots_of))
            assert stats.num_used <= num_slots <= NUM_SNAPSHOTS
            assert num_bytes == num_slots * STATE_BYTES
            num_evicted = stats.num_evicted
            sizes.append(active_bytes())
        assert num_cached > count / 10
        assert num_evicted > count / 10
        assert max(sizes) - sizes[0] < GROWTH_BYTES
        await check_sleep(engine, texts[-1])
    gc.collect()
    assert active_bytes() - before < GROWTH_BYTES


async def check_sleep(engine: AsyncEngine, prompt: tuple[int, ...]) -> None:
    """Check that a sleeping engine keeps nothing, and computes the same afterwards."""
    _, wanted = await ask(engine, 10_001, prompt)
    before = active_bytes()
    await engine.control.sleep(1, PauseMode.KEEP)
    stats, num_slots, _ = await engine.call(Do(snapshots_of))
    assert stats.num_used == num_slots == 0
    assert await engine.call(Do(lambda loop: len(store_of(loop)._rows))) == 0
    assert active_bytes() < before - (1 << 19)
    await engine.control.wake_up()
    assert await ask(engine, 10_002, prompt) == (0, wanted)
    cached, tokens = await ask(engine, 10_003, prompt)
    assert cached == (len(prompt) - 1) // 4 * 4
    assert tokens == wanted


def active_bytes() -> int:
    """Return the memory of arrays, cached memory excluded."""
    mx.clear_cache()
    return mx.get_active_memory()
