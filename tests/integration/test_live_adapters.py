"""Adapters loaded, replaced and unloaded while requests run, in a real engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model

from mlx_parallm.adapters.formats import read_adapter
from mlx_parallm.adapters.safetensors import read_safetensors
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.config import AdapterConfig, EngineConfig, SchedulerConfig
from mlx_parallm.demo_models.folders import DEMO_FOLDER, DEMO_NAME
from mlx_parallm.engine.commands import LoopState
from mlx_parallm.engine.control import PauseMode
from mlx_parallm.engine.policies import AdapterUpload, Policies
from mlx_parallm.generation.engine import GenerationEngine
from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.serving.async_engine import AsyncEngine
from mlx_parallm.types.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    NotFoundError,
    PausedError,
    VersionMismatchError,
)
from mlx_parallm.types.events import FinishReason, PromptEvent, TokenEvent
from mlx_parallm.types.request import DEFAULT_VERSION, GenerateRequest, SamplingParams
from tests.engine_action import Do

PROMPT = tuple(range(50, 90))
KEYS = ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"]
RANK = 4
#: Tokens of a request that is far from its end when the engine carries out the next command.
MANY = 150


def policies_of(loop: LoopState) -> Policies:
    """Return what knows the embedded model's adapters."""
    engine = loop.engines[DEMO_NAME]
    assert isinstance(engine, GenerationEngine)
    return engine.policies


@pytest.fixture(scope="module")
def shapes() -> dict[str, tuple[int, ...]]:
    """Return the tensors' shapes of an adapter for the embedded model."""
    loaded: Any = load_model(DEMO_FOLDER)
    model, _ = loaded
    settings = {"rank": RANK, "scale": 2.0, "dropout": 0.0, "keys": KEYS}
    linear_to_lora_layers(model, len(model.layers), settings)
    named: Any = tree_flatten(model.parameters())
    return {
        name: value.shape
        for name, value in named
        if name.rpartition(".")[2] in ("lora_a", "lora_b")
    }


def save(folder: Path, shapes: dict[str, tuple[int, ...]], seed: int) -> Path:
    """Write a random adapter in mlx_lm's form; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    mx.random.seed(seed)
    tensors = {name: mx.random.normal(shape) * 0.1 for name, shape in shapes.items()}
    mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)
    config = '{"fine_tune_type": "lora", "lora_parameters": {"rank": 4, "scale": 2.0}}'
    (folder / "adapter_config.json").write_text(config)
    return folder


def adapter(tmp_path: Path, shapes: dict[str, tuple[int, ...]], seed: int) -> AdapterWeights:
    data = (save(tmp_path / str(seed), shapes, seed) / "adapters.safetensors").read_bytes()
    config = {"fine_tune_type": "lora", "lora_parameters": {"scale": 2.0}}
    return read_adapter(config, read_safetensors(data, param="adapter"), param="adapter")


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of named adapters."""
    return tmp_path_factory.mktemp("named")


@pytest.fixture(scope="module")
def started(named: Path) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(
        EngineConfig(
            scheduler=SchedulerConfig(max_loras=2, max_num_seqs=8),
            adapters=AdapterConfig(directory=str(named), max_loaded=3),
        )
    )
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
async def engine(started: AsyncEngine) -> AsyncIterator[AsyncEngine]:
    """Yield an engine without adapters that has computed nothing."""
    await started.control.reset_prefix_cache()
    yield started
    for info in started.control.adapters():
        await started.control.unload_adapter(info.name)


class Sample:
    """The results of a greedy request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.versions: list[str] = []
        self.logprobs: list[float] = []
        self.num_cached = 0
        self.finish: FinishReason | None = None


async def generate(
    engine: AsyncEngine,
    model: str,
    request_id: str,
    num_tokens: int = 12,
    begun: asyncio.Event | None = None,
) -> Sample:
    """Return the sample of a request; ``begun`` is set at the first."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=0)
    handle = await GENERATION.client(engine).submit(
        GenerateRequest(request_id=request_id, model=model, prompt_ids=PROMPT, params=params)
    )
    sample = Sample()
    async for event in handle.events:
        if isinstance(event, PromptEvent):
            sample.num_cached = event.num_cached_tokens
        elif isinstance(event, TokenEvent):
            sample.tokens += event.token_ids
            sample.versions += [event.version] * len(event.token_ids)
            sample.logprobs += [token.logprob for token in event.logprobs]
            sample.finish = event.finish_reason or sample.finish
            if begun is not None:
                begun.set()
    return sample


async def begin(
    engine: AsyncEngine, model: str, request_id: str, num_tokens: int = 12
) -> asyncio.Task[Sample]:
    """Start ``generate`` and return it after its first token."""
    begun = asyncio.Event()
    task = asyncio.create_task(generate(engine, model, request_id, num_tokens, begun))
    await begun.wait()
    return task


def is_same(sample: Sample, other: Sample) -> bool:
    pairs = zip(sample.logprobs, other.logprobs, strict=True)
    return sample.tokens == other.tokens and all(abs(a - b) < 1e-4 for a, b in pairs)


async def test_a_new_version_is_that_of_a_fresh_server(
    engine: AsyncEngine, tmp_path: Path, shapes: dict[str, tuple[int, ...]]
) -> None:
    first, second = adapter(tmp_path, shapes, 1), adapter(tmp_path, shapes, 2)
    base = await generate(engine, DEMO_NAME, "base")
    assert set(base.versions) == {DEFAULT_VERSION}
    info = await engine.control.load_adapter(AdapterUpload(name="p", weights=first))
    assert (info.version, info.digest, info.rank) == ("1", first.digest, RANK)
    adapted = await generate(engine, "p", "one")
    assert set(adapted.versions) == {"1"}
    assert not is_same(adapted, base)
    assert adapted.num_cached == 0
    again = await generate(engine, f"{DEMO_NAME}:p", "again")
    assert again.num_cached > 0
    assert is_same(again, adapted)
    with pytest.raises(VersionMismatchError):
        await engine.control.load_adapter(
            AdapterUpload(name="p", weights=second, replaces=True, expected_version="7")
        )
    with pytest.raises(InvalidRequestError, match="loaded already"):
        await engine.control.load_adapter(AdapterUpload(name="p", weights=second))
    info = await engine.control.load_adapter(
        AdapterUpload(name="p", weights=second, replaces=True, expected_version="1")
    )
    assert info.version == "2"
    two = await generate(engine, "p", "two")
    assert two.num_cached == 0
    assert not is_same(two, adapted)
    # Equal bytes under another name compute equal KV.
    await engine.control.load_adapter(AdapterUpload(name="twin", weights=second))
    twin = await generate(engine, "twin", "twin")
    assert twin.num_cached > 0
    assert is_same(twin, two)
    back = await generate(engine, DEMO_NAME, "back")
    assert back.num_cached > 0
    assert is_same(back, base)


async def test_a_running_request_goes_on_with_the_new_version(
    engine: AsyncEngine, tmp_path: Path, shapes: dict[str, tuple[int, ...]]
) -> None:
    first, second = adapter(tmp_path, shapes, 1), adapter(tmp_path, shapes, 2)
    await engine.control.load_adapter(AdapterUpload(name="p", weights=first, version="a"))
    alone = await generate(engine, "p", "alone", MANY)
    running = await begin(engine, "p", "running", MANY)
    await engine.control.pause(PauseMode.KEEP)
    await engine.control.load_adapter(
        AdapterUpload(name="p", weights=second, version="b", replaces=True)
    )
    await engine.control.resume()
    straddling = await running
    assert {*straddling.versions} == {"a", "b"}
    switch = straddling.versions.index("b")
    assert straddling.versions == ["a"] * switch + ["b"] * (MANY - switch)
    assert straddling.tokens[:switch] == alone.tokens[:switch]
    # KV computed with both versions is not cached.
    after = await generate(engine, "p", "after", MANY)
    assert after.num_cached == 0
    assert set(after.versions) == {"b"}


async def test_more_adapters_than_slots_take_turns(
    engine: AsyncEngine, tmp_path: Path, shapes: dict[str, tuple[int, ...]]
) -> None:
    for seed in (1, 2, 3):
        weights = adapter(tmp_path, shapes, seed)
        await engine.control.load_adapter(AdapterUpload(name=f"p{seed}", weights=weights))
    names = [f"p{seed}" for seed in (1, 2, 3)] * 2
    alone = {name: await generate(engine, name, name) for name in set(names)}
    both = await asyncio.gather(*(generate(engine, n, f"{n}-{i}") for i, n in enumerate(names)))
    assert all(is_same(sample, alone[name]) for name, sample in zip(names, both, strict=True))
    assert sum(info.is_resident for info in engine.control.adapters()) <= 2
    weights = adapter(tmp_path, shapes, 4)
    with pytest.raises(InvalidRequestError, match="max-cpu-loras"):
        await engine.control.load_adapter(AdapterUpload(name="p4", weights=weights))


async def test_an_unloaded_adapter_ends_what_it_began(
    engine: AsyncEngine, tmp_path: Path, shapes: dict[str, tuple[int, ...]]
) -> None:
    weights = adapter(tmp_path, shapes, 1)
    await engine.control.load_adapter(AdapterUpload(name="p", weights=weights))
    alone = await generate(engine, "p", "alone")
    running = await begin(engine, "p", "running")
    await engine.control.unload_adapter("p")
    assert is_same(await running, alone)
    with pytest.raises(ModelNotFoundError):
        await generate(engine, "p", "late")
    with pytest.raises(NotFoundError):
        await engine.control.unload_adapter("p")


async def test_adapters_are_found_by_name_and_come_back(
    engine: AsyncEngine, named: Path, shapes: dict[str, tuple[int, ...]]
) -> None:
    for seed in range(4):
        save(named / f"step-{seed}", shapes, seed)
    first = await generate(engine, "step-0", "first")
    assert set(first.versions) == {"1"}
    for seed in (1, 2, 3):
        await generate(engine, f"{DEMO_NAME}:step-{seed}", f"r{seed}")
    # It was evicted for the fourth.
    assert {info.name for info in engine.control.adapters()} == {"step-1", "step-2", "step-3"}
    assert is_same(await generate(engine, "step-0", "again"), first)
    for name in ("step-9", "../named", "..", "step-0/../../x", "/etc"):
        with pytest.raises(ModelNotFoundError):
            GENERATION.client(engine).get_model(name)


async def test_an_adapter_that_had_to_go_comes_with_its_request(
    engine: AsyncEngine, named: Path, shapes: dict[str, tuple[int, ...]]
) -> None:
    """Unload between an adapter's load and its request, while others believe it is there."""
    save(named / "gone", shapes, 5)
    first = await generate(engine, "gone", "first")
    await engine.call(Do(lambda loop: policies_of(loop).unload("gone")))
    assert is_same(await generate(engine, "gone", "second"), first)
    assert [info.name for info in engine.control.adapters()] == ["gone"]


async def test_a_load_by_name_replaces_no_upload(
    engine: AsyncEngine, named: Path, tmp_path: Path, shapes: dict[str, tuple[int, ...]]
) -> None:
    save(named / "both", shapes, 5)
    upload = AdapterUpload(name="both", weights=adapter(tmp_path, shapes, 6), version="mine")
    # The request looked for a folder before it learned of the upload.
    await engine.call(Do(lambda loop: policies_of(loop).load(upload)))
    assert set((await generate(engine, "both", "r")).versions) == {"mine"}
    assert [info.version for info in engine.control.adapters()] == ["mine"]


async def test_pauses(engine: AsyncEngine) -> None:
    control = engine.control
    alone = await generate(engine, DEMO_NAME, "alone", MANY)
    kept = await begin(engine, DEMO_NAME, "kept", MANY)
    assert await control.pause(PauseMode.KEEP) == 1
    assert control.is_paused
    queued = asyncio.ensure_future(generate(engine, DEMO_NAME, "queued", 4))
    await control.reset_prefix_cache(reset_running=True)
    assert not kept.done()
    await control.resume()
    await control.resume()
    assert (await kept).tokens == alone.tokens
    assert (await queued).tokens == alone.tokens[:4]
    cut = await begin(engine, DEMO_NAME, "cut", MANY)
    assert await control.pause(PauseMode.ABORT) == 1
    assert (await cut).finish is FinishReason.ABORT
    with pytest.raises(PausedError):
        await generate(engine, DEMO_NAME, "late")
    await control.resume()
    whole = await begin(engine, DEMO_NAME, "whole", MANY)
    # A request held by another pause is waited for too.
    await control.pause(PauseMode.KEEP)
    await control.pause(PauseMode.WAIT)
    assert whole.done()
    assert (await whole).tokens == alone.tokens
    await control.resume()
    assert (await generate(engine, DEMO_NAME, "end", MANY)).tokens == alone.tokens
