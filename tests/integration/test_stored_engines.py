"""Engines with a folder for KV: what finds what, before and after they start anew."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.config import AdapterConfig, CacheConfig, EngineConfig, ModelConfig
from mlx_parallm.demo_models.folders import DEMO_FOLDERS, PREFIX
from mlx_parallm.engine.control import PauseMode
from mlx_parallm.engine.live_weights import WeightsUpdate
from mlx_parallm.engine.policies import AdapterUpload
from mlx_parallm.generation import assembly
from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.generation.kv_cache import fetches
from mlx_parallm.generation.kv_cache.stores import StoreStats
from mlx_parallm.images.processor import host_array
from mlx_parallm.serving.async_engine import AsyncEngine
from mlx_parallm.types.events import PromptEvent, TokenEvent
from mlx_parallm.types.model_input import (
    FEATURE,
    TOKEN_IDS,
    HostArray,
    InputKind,
    ModelInput,
    Span,
)
from mlx_parallm.types.request import INPUT_TOKEN, CacheScope, GenerateRequest, SamplingParams
from tests.engine_action import Do
from tests.integration.test_live_adapters import adapter, shapes
from tests.integration.test_live_weights import CHANGED, save, tensor_of

__all__ = ["shapes"]

NAME, BLOCK_SIZE = "model", 4
#: Long enough that its blocks are kept.
PROMPT = tuple(50 + 7 * i % 200 for i in range(81))
NUM_CACHED = 80
NUM_FEATURES = 64
numbers = itertools.count()


@dataclass(frozen=True)
class Sample:
    """The result of a greedy request."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int

    def is_like(self, other: Sample) -> bool:
        """True if the tokens are equal, and their numbers but for rounding."""
        return self.tokens == other.tokens and np.allclose(self.logprobs, other.logprobs, atol=1e-4)


@pytest.fixture(scope="module", autouse=True)
def _no_read_is_late() -> Iterator[None]:
    """Let no test depend on how fast a disk is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetches, "LONGEST_READ_S", 1e6)
        patch.setattr(fetches.UnitPace, "predict", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[float, Path]:
    root = tmp_path_factory.mktemp("weights")
    return {scale: save(root / str(scale), scale) for scale in (1.0, 0.5)}


class Process:
    """An engine over a folder for KV."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine

    async def ask(self, prompt: Sequence[int] = PROMPT, model: str = NAME, **fields: Any) -> Sample:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
        request = GenerateRequest(
            request_id=str(next(numbers)),
            model=model,
            prompt_ids=tuple(prompt),
            params=params,
            **fields,
        )
        handle = await GENERATION.client(self.engine).submit(request)
        tokens, logprobs, cached = list[int](), list[float](), 0
        async for event in handle.events:
            if isinstance(event, PromptEvent):
                cached = event.num_cached_tokens
            elif isinstance(event, TokenEvent):
                tokens += event.token_ids
                logprobs += [token.logprob for token in event.logprobs]
        return Sample(tuple(tokens), tuple(logprobs), cached)

    async def ask_twice(self, **fields: Any) -> Sample:
        """Return what a request gives from memory; the first one found nothing."""
        cold, memory = await self.ask(**fields), await self.ask(**fields)
        assert cold.cached == 0
        assert memory.cached >= NUM_CACHED
        assert memory.is_like(cold)
        return memory

    async def forget_memory(self) -> None:
        await self.engine.control.reset_prefix_cache(reset_external=False)

    async def know_weights(self) -> None:
        """Wait until the content of the weights is known."""
        await self.engine.call(Do(lambda loop: loop.engines[NAME].live.contents.join()))

    async def stats(self) -> StoreStats:
        """Return the store's state once all is there that it is to get."""

        def saved(loop: Any) -> StoreStats:
            engine = loop.engines[NAME]
            engine._save_all()
            (tier,) = engine._tiers.stats().tiers
            return tier.store

        return await self.engine.call(Do(saved))


@asynccontextmanager
async def process(
    folder: Path, disk: Path, *, cache: Mapping[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Process]:
    engine = AsyncEngine(
        EngineConfig(
            models=(ModelConfig(path=str(folder), served_names=(NAME,)),),
            cache=CacheConfig(
                **{
                    "block_size": BLOCK_SIZE,
                    "kv_cache_bytes": 1 << 24,
                    "kv_disk": disk,
                    "kv_disk_bytes": 1 << 28,
                    **(cache or {}),
                }
            ),
            adapters=AdapterConfig(allowed_roots=(str(folder.parent),)),
            warm_up=False,
            enable_prompt_embeds=True,
            **settings,
        )
    )
    engine.start()
    try:
        served = Process(engine)
        await served.know_weights()
        yield served
    finally:
        engine.stop()


async def test_salts_keys_and_adapters_find_their_own_after_a_restart(
    folders: dict[float, Path], tmp_path: Path, shapes: dict[str, tuple[int, ...]]
) -> None:
    weights = adapter(tmp_path, shapes, 1)
    disk = tmp_path / "kv"
    own: list[dict[str, Any]] = [
        {},
        {"model": "adapted"},
        {"cache_salt": "s"},
        {"scope": CacheScope("key")},
        {"cache_salt": "s", "scope": CacheScope("key")},
        {"extra_key": "e"},
    ]
    others: list[dict[str, Any]] = [
        {"cache_salt": "t"},
        {"scope": CacheScope("other key")},
        {"scope": CacheScope("s")},
        {"cache_salt": "key", "scope": CacheScope("s")},
        {"cache_salt": "e"},
        {"cache_salt": "adapted"},
        {"cache_salt": weights.digest},
        {"model": "adapted", "cache_salt": "s"},
        {"prompt": (51, *PROMPT[1:])},
    ]
    async with process(folders[1.0], disk) as first:
        await first.engine.control.load_adapter(AdapterUpload(name="adapted", weights=weights))
        memory = [await first.ask_twice(**fields) for fields in own]
    assert len({sample.logprobs for sample in memory}) == 2
    async with process(folders[1.0], disk) as second:
        upload = AdapterUpload(name="adapted", weights=weights)
        await second.engine.control.load_adapter(upload)
        for fields in others:
            assert (await second.ask(**fields)).cached == 0
        assert [await second.ask(**fields) for fields in own] == memory
        # Another adapter under the same name.
        other = AdapterUpload(name="adapted", weights=adapter(tmp_path, shapes, 2), replaces=True)
        await second.engine.control.load_adapter(other)
        await second.forget_memory()
        assert (await second.ask(model="adapted")).cached == 0
        await second.engine.control.load_adapter(replace(upload, replaces=True))
        # What is here again does not come from the disk.
        assert [await second.ask(**fields) for fields in own] == memory


async def test_adapters_that_are_not_cached_are_never_written(
    folders: dict[float, Path], tmp_path: Path, shapes: dict[str, tuple[int, ...]]
) -> None:
    weights = adapter(tmp_path, shapes, 1)
    upload = AdapterUpload(name="changing", weights=weights, replaces=True)
    async with process(folders[1.0], tmp_path / "kv") as served:
        for changed in (
            replace(upload, opaque="an id"),
            replace(upload, opaque="an id", is_cached=False),
            replace(upload, is_cached=False),
        ):
            await served.engine.control.load_adapter(changed)
            for _ in range(2):
                await served.ask(model="changing")
            assert (await served.stats()).written_blocks == (await served.stats()).num_blocks == 0
        await served.engine.control.load_adapter(upload)
        await served.ask(model="changing")
        assert (await served.stats()).num_blocks == 21


async def test_weights_that_come_back_find_theirs(
    folders: dict[float, Path], tmp_path: Path
) -> None:
    disk = tmp_path / "kv"
    tensors = {CHANGED: HostTensor(tensor_of(folders[0.5], CHANGED) * 0.5)}
    digest: Future[str | None] = Future()
    digest.set_result("digest of these")

    async def update(served: Process) -> None:
        await served.engine.control.update_weights(WeightsUpdate(tensors=tensors), digest=digest)

    async def read(served: Process, scale: float) -> None:
        await served.engine.control.update_weights_from_folder(str(folders[scale]))
        await served.know_weights()

    async with process(folders[1.0], disk) as first:
        base = await first.ask_twice()
        await update(first)
        updated = await first.ask_twice()
        await read(first, 0.5)
        half = await first.ask_twice()
        assert len({base.logprobs, updated.logprobs, half.logprobs}) == 3
        await first.forget_memory()
        await read(first, 1.0)
        assert await first.ask() == base
        written = (await first.stats()).num_blocks
        # Weights of which no digest is known are neither written nor found.
        await first.engine.control.update_weights(WeightsUpdate(tensors=tensors))
        for _ in range(2):
            assert (await first.ask()).is_like(updated)
            await first.forget_memory()
        assert (await first.stats()).num_blocks == written
    async with process(folders[1.0], disk) as second:
        await update(second)
        assert await second.ask() == updated
        await read(second, 0.5)
        assert await second.ask() == half
        await read(second, 1.0)
        assert await second.ask() == base
    async with process(folders[0.5], disk) as third:
        assert await third.ask() == half
        await update(third)
        assert (await third.ask()).cached == 0


@pytest.mark.slow
async def test_an_update_amid_a_sequence_writes_what_was_before_it_only(
    folders: dict[float, Path], tmp_path: Path
) -> None:
    disk = tmp_path / "kv"
    async with process(folders[1.0], disk) as first:
        params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
        request = GenerateRequest(
            request_id="straddles", model=NAME, prompt_ids=PROMPT, params=params
        )
        handle = await GENERATION.client(first.engine).submit(request)
        tokens: list[int] = []
        async for event in handle.events:
            if isinstance(event, TokenEvent):
                if not tokens:
                    await first.engine.control.update_weights_from_folder(str(folders[0.5]))
                tokens += event.token_ids
        await first.know_weights()
        await first.stats()
    longer = (*PROMPT, *tokens, 60, 61)
    for scale in (1.0, 0.5):
        async with process(folders[scale], tmp_path / "none") as fresh:
            wanted = await fresh.ask(longer)
        async with process(folders[scale], disk) as served:
            sample = await served.ask(longer)
            assert sample.is_like(wanted)
            first_part = range(NUM_CACHED, len(PROMPT) + 60)
            assert sample.cached in (first_part if scale == 1.0 else (0,))


@pytest.mark.parametrize("level", [1, 2])
async def test_wake_finds_what_was_there_before_sleep(
    folders: dict[float, Path], tmp_path: Path, level: int
) -> None:
    async with process(folders[1.0], tmp_path / "kv") as served:
        memory = await served.ask_twice()
        await served.engine.control.sleep(level, PauseMode.KEEP)
        await served.engine.control.wake_up()
        await served.know_weights()
        assert await served.ask() == memory
        await served.engine.control.reset_prefix_cache()
        assert (await served.ask()).cached == 0


def with_image(seed: int) -> dict[str, Any]:
    """Return the fields of a request with an image between tokens."""
    ids = (*PROMPT[:3], *(INPUT_TOKEN,) * NUM_FEATURES, *PROMPT[3:17])
    pixels = np.random.default_rng(seed).normal(size=(1, 3, 64, 64)).astype(np.float32)
    source = ModelInput(
        kind=InputKind.IMAGE,
        content=f"image {seed}",
        arrays={
            "pixel_values": host_array(pixels),
            TOKEN_IDS: host_array(np.full(NUM_FEATURES, FEATURE, np.int32)),
        },
        nbytes=NUM_FEATURES * 512,
        cost=1,
        span=Span(3, 3 + NUM_FEATURES),
        shape_key="64",
    )
    return {"prompt": ids, "inputs": (source,)}


def with_rows(seed: int, width: int) -> dict[str, Any]:
    """Return the fields of a request whose prompt is rows in place of tokens."""
    rows = np.random.default_rng(seed).normal(size=(len(PROMPT), width)).astype(np.float32)
    source = ModelInput(
        kind=InputKind.PROMPT_EMBEDS,
        content=f"rows {seed}",
        arrays={"rows": HostArray("float32", rows.shape, rows.tobytes())},
        nbytes=rows.nbytes,
        span=Span(0, len(PROMPT)),
    )
    return {"prompt": (INPUT_TOKEN,) * len(PROMPT), "inputs": (source,)}


async def test_images_and_rows_are_found_by_their_contents(tmp_path: Path) -> None:

    disk, folder = tmp_path / "kv", DEMO_FOLDERS[PREFIX + "see"]
    async with process(folder, disk) as first:
        width = GENERATION.client(first.engine).get_model(NAME).info.input_width
        own = [with_image(1), with_image(2), with_rows(1, width), with_rows(2, width)]
        memory = [await first.ask_twice(**fields) for fields in own]
        assert len({sample.logprobs for sample in memory}) == 4
    async with process(folder, disk) as second:
        assert (await second.ask(**with_image(3))).cached == 0
        assert (await second.ask(**with_rows(3, width))).cached == 0
        assert (await second.ask((INPUT_TOKEN,) * len(PROMPT))).cached == 0
        assert [await second.ask(**fields) for fields in own] == memory


def changed_byte(folder: Path) -> None:
    """Change one byte of the weights in place, with the times that were."""
    file = folder / "model.safetensors"
    status = file.stat()
    with file.open("r+b") as weights:
        weights.seek(-3, os.SEEK_END)
        byte = weights.read(1)
        weights.seek(-3, os.SEEK_END)
        weights.write(bytes([byte[0] ^ 1]))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def changed_config(name: str, value: Any) -> Any:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        assert config.get(name) != value
        (folder / "config.json").write_text(json.dumps(config | {name: value}))

    return change


def added_code(folder: Path) -> None:
    (folder / "modeling.py").write_text("# Nothing.\n")


CHANGES = {
    "a byte": changed_byte,
    "rms_norm_eps": changed_config("rms_norm_eps", 2e-5),
    "rope_theta": changed_config("rope_theta", 12345.0),
    "an unknown field": changed_config("unknown_field", 1),
    "code": added_code,
}


async def cached_with(folder: Path, disk: Path, **settings: Any) -> int:
    async with process(folder, disk, **settings) as served:
        cached = (await served.ask()).cached
        await served.stats()
        return cached


@pytest.mark.slow
async def test_what_decides_the_bytes_of_a_block_decides_what_is_found(
    folders: dict[float, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, folder = tmp_path / "kv", tmp_path / "model"
    shutil.copytree(folders[1.0], folder)
    assert await cached_with(folder, disk) == 0
    for change in CHANGES.values():
        shutil.rmtree(folder)
        shutil.copytree(folders[1.0], folder)
        change(folder)
        assert await cached_with(folder, disk) == 0
    # Another model under the same path.
    shutil.rmtree(folder)
    shutil.copytree(folders[0.5], folder)
    assert await cached_with(folder, disk) == 0
    for cache in ({"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "int4"}, {"block_size": 8}):
        assert await cached_with(folders[1.0], disk, cache=cache) == 0
    with monkeypatch.context() as patch:
        versions = assembly.package_versions() | {"mlx-lm": "another"}
        patch.setattr(assembly, "package_versions", lambda: versions)
        assert await cached_with(folders[1.0], disk) == 0
    # The path is no part of it, nor are the texts of tokens.
    shutil.rmtree(folder)
    shutil.copytree(folders[1.0], tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "README.md").write_text("Read me.")
    tokenizer = tmp_path / "elsewhere" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"version"', '"version" '))
    assert await cached_with(tmp_path / "elsewhere", disk) == NUM_CACHED
