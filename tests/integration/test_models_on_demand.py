"""Generators that are loaded, evicted and loaded again beside others, on real engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.config import (
    CacheConfig,
    EngineConfig,
    LoadingConfig,
    MemoryBound,
    MemoryConfig,
    ModelConfig,
)
from mlx_parallm.demo_models.folders import DEMO_FOLDER, DEMO_NAME
from mlx_parallm.engine.adapter_commands import ListVersions
from mlx_parallm.engine.control import PauseMode
from mlx_parallm.engine.core import EngineCore
from mlx_parallm.engine.kind import ModelLoad
from mlx_parallm.engine.ledger import KV, WEIGHTS
from mlx_parallm.engine.live_weights import WeightsUpdate
from mlx_parallm.engine.status import ModelState
from mlx_parallm.serving.async_engine import AsyncEngine
from mlx_parallm.types.errors import OutOfMemoryError
from mlx_parallm.types.events import PromptEvent, TokenEvent
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.worker.generation.paged_cache import KVPools
from mlx_parallm.worker.ops import Allocate, Load
from mlx_parallm.worker.worker import Worker
from tests.engine_action import Do

MIB = 1 << 20
#: PROMPT: more than two blocks of it.
PROMPT = tuple(range(40, 90))


def started(*names: str, limit: int | None = None, **more: Any) -> EngineCore:
    config = EngineConfig(
        models=tuple(ModelConfig(served_names=(name,)) for name in names),
        cache=CacheConfig(kv_cache_bytes=64 * MIB),
        memory=MemoryConfig(limit=None if limit is None else MemoryBound(size=limit)),
        loading=LoadingConfig(min_use_s=0),
        warm_up=False,
    )
    core = AsyncEngine(replace(config, **more))
    core.start()
    return core


@pytest.fixture
async def core() -> AsyncIterator[EngineCore]:
    core = started("a", limit=400 * MIB)
    yield core
    core.stop()


def load(name: str, **more: Any) -> ModelLoad:
    return ModelLoad(model=DEMO_NAME, names=(name,), **more)


class Answer:
    """The tokens of an answer, and how many of its prompt were cached."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.num_cached = 0


async def answer(core: EngineCore, model: str, prompt: tuple[int, ...] = PROMPT) -> Answer:
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    request = GenerateRequest(
        request_id=f"{model} {id(params)}", model=model, prompt_ids=prompt, params=params
    )
    result = Answer()
    async for event in await core.open_reader(request):
        if isinstance(event, PromptEvent):
            result.num_cached = event.num_cached_tokens
        if isinstance(event, TokenEvent):
            result.tokens += event.token_ids
    return result


def states(core: EngineCore) -> dict[str, ModelState]:
    return {status.names[0]: status.state for status in core.statuses()}


def promised(core: EngineCore) -> dict[tuple[str, str], int]:
    claims, _ = core.directory.claims()
    return {(claim.model, claim.what): claim.num_bytes for claim in claims}


async def test_a_load_leaves_nothing_once_it_is_unloaded(core: EngineCore) -> None:
    expected = (await answer(core, "a")).tokens
    await core.load_model(load("b"))
    assert (await answer(core, "b")).tokens == expected
    await core.unload_model("b")
    before = mx.get_active_memory()
    for _ in range(2):
        await core.load_model(load("b"))
        assert (await answer(core, "b")).tokens == expected
        await core.unload_model("b")
        # The memory is back with the answer.
        assert mx.get_active_memory() <= 1.03 * before
    assert set(promised(core)) == {("a", WEIGHTS), ("a", KV)}


async def test_idle_models_give_back_kv_first_and_get_it_again() -> None:
    core = started("a", limit=220 * MIB)
    expected = (await answer(core, "a")).tokens
    full = promised(core)["a", KV]
    await core.load_model(load("b"))
    await core.load_model(load("c"))
    sizes = promised(core)
    assert states(core) == dict.fromkeys("abc", ModelState.LOADED)
    assert sizes["a", KV] < full
    assert sum(sizes.values()) <= 220 * MIB
    for name in "abc":
        assert (await answer(core, name)).tokens == expected
    memory = await core.memory()
    assert memory["a"].kv <= sizes["a", KV]
    await core.unload_model("b")
    await core.unload_model("c")
    assert promised(core)["a", KV] == full
    assert (await answer(core, "a")).tokens == expected
    core.stop()


async def test_kv_that_cannot_grow_is_as_large_as_before_and_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = started("a", limit=220 * MIB)
    expected = (await answer(core, "a")).tokens
    await core.load_model(load("b"))
    await core.load_model(load("c"))
    assert (await answer(core, "a")).tokens == expected
    small = promised(core)["a", KV]
    restore, failures = KVPools.restore, [OutOfMemoryError("There is no room to grow.")]

    def lacking(pools: KVPools, num_blocks: int | None = None) -> None:
        if failures:
            raise failures.pop()
        restore(pools, num_blocks)

    monkeypatch.setattr(KVPools, "restore", lacking)
    await core.unload_model("b")
    assert not failures
    assert promised(core)["a", KV] == small
    # Nothing is found in a pool that was emptied.
    again = await answer(core, "a")
    assert (again.tokens, again.num_cached) == (expected, 0)
    core.stop()


async def test_models_take_turns_where_one_fits_and_answer_alike() -> None:
    core = started("a", limit=110 * MIB)
    expected = (await answer(core, "a")).tokens
    for name in "bc":
        await core.load_model(load(name))
    answers = await asyncio.gather(*(answer(core, name) for name in "abcabcabc"))
    assert all(each.tokens == expected for each in answers)
    assert list(states(core).values()).count(ModelState.LOADED) == 1
    core.stop()


async def test_a_model_comes_back_with_what_is_on_disk(tmp_path: Path) -> None:
    cache = CacheConfig(kv_cache_bytes=64 * MIB, kv_disk=tmp_path / "kv")
    core = started("a", limit=110 * MIB, cache=cache)
    # Shorter chains are not kept.
    prompt = PROMPT * 8
    first = again = await answer(core, "a", prompt)
    await core.load_model(load("b"))
    # Blocks are kept once the content of the weights is known, which takes a moment.
    while again.num_cached < 256:
        assert states(core)["a"] is ModelState.EVICTED
        again = await answer(core, "a", prompt)
        assert again.tokens == first.tokens
        assert states(core)["b"] is ModelState.EVICTED
        await answer(core, "b", prompt=(1, 2, 3))
    core.stop()


@pytest.mark.parametrize("stage", ["begin", "read", "allocate", "check"])
async def test_a_load_without_memory_fails_alone(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    expected = (await answer(core, "a")).tokens
    await core.load_model(load("b", is_pinned=True))
    await core.unload_model("b")
    before = mx.get_active_memory()
    fails = Failing(stage, times=9)
    monkeypatch.setattr(Worker, "begin", fails.begin)
    with pytest.raises(OutOfMemoryError):
        await core.load_model(load("b"))
    # Once more after all idle models are evicted, and not again.
    assert fails.count == 2
    monkeypatch.undo()
    assert "b" not in states(core)
    assert {model for model, _ in promised(core)} <= {"a"}
    assert (await answer(core, "a")).tokens == expected
    assert mx.get_active_memory() <= 1.03 * before
    await core.load_model(load("b"))
    assert (await answer(core, "b")).tokens == expected


async def test_a_load_succeeds_once_others_have_left(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = (await answer(core, "a")).tokens
    monkeypatch.setattr(Worker, "begin", Failing("allocate", times=1).begin)
    await core.load_model(load("b"))
    assert states(core) == {"a": ModelState.EVICTED, "b": ModelState.LOADED}
    assert (await answer(core, "b")).tokens == expected
    assert (await answer(core, "a")).tokens == expected


class Failing:
    """Lacks memory at a stage of loads: in the op itself, or where it is advanced."""

    def __init__(self, stage: str, times: int) -> None:
        self.stage = stage
        self.times = times
        self.count = 0
        self._begin: Callable[..., Any] = Worker.begin

    @property
    def begin(self) -> Callable[..., Any]:
        def begin(worker: Worker, op: Any) -> Any:
            is_op = isinstance(op, Load if self.stage in ("begin", "read") else Allocate)
            if is_op and self.stage in ("begin", "allocate"):
                self.fail()
            pending = self._begin(worker, op)
            return Breaking(pending, self) if is_op else pending

        return begin

    def fail(self) -> None:
        if self.count < self.times:
            self.count += 1
            raise OutOfMemoryError("The device cannot provide 1 GiB of memory.")


class Breaking:
    """A pending op that fails in the middle of its stages."""

    def __init__(self, pending: Any, failing: Failing) -> None:
        self._pending = pending
        self._failing = failing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pending, name)

    def advance(self) -> None:
        self._pending.advance()
        if self._failing.stage in ("read", "check"):
            self._failing.fail()


async def test_weights_that_changed_by_tensors_stay(core: EngineCore) -> None:
    await core.load_model(load("b"))
    tensors = weights_of("model.norm.weight")
    await core.control.update_weights(WeightsUpdate(tensors=tensors, version="new"), model="b")
    changed = (await answer(core, "b")).tokens
    for name in "cdefg":
        await core.load_model(load(name))
    assert states(core)["b"] is ModelState.LOADED
    assert (await answer(core, "b")).tokens == changed
    assert core.control.version("b").label == "new"
    # With the weights of its folder it can leave again.
    await core.control.update_weights(WeightsUpdate(folder=DEMO_FOLDER), model="b")
    for name in "hijkl":
        await core.load_model(load(name))
    assert states(core)["b"] is ModelState.EVICTED


def weights_of(name: str) -> dict[str, HostTensor]:
    return {name: HostTensor(np.full(256, 0.5, np.float32))}


async def test_a_label_and_an_adapter_outlive_an_eviction(core: EngineCore) -> None:
    await core.load_model(load("b"))
    await core.control.set_version("labelled", model="b")
    for name in "cdefg":
        await core.load_model(load(name))
    assert states(core)["b"] is ModelState.EVICTED
    await answer(core, "b")
    assert core.control.version("b").label == "labelled"


async def test_a_label_reaches_an_evicted_model(core: EngineCore) -> None:
    await core.load_model(load("b", ttl_s=0))
    while states(core)["b"] is not ModelState.EVICTED:
        await core.call(ListVersions())
    await core.control.set_version("late", model="b")
    assert core.control.version("b").label == "late"


async def test_pinned_models_stay(core: EngineCore) -> None:
    await core.load_model(load("b", is_pinned=True))
    for name in "cdefg":
        await core.load_model(load(name))
    assert states(core)["b"] is ModelState.LOADED


async def test_an_unload_while_it_loads_is_carried_out_after(core: EngineCore) -> None:
    loading = asyncio.ensure_future(core.load_model(load("b")))
    # Its name is taken before anything is read.
    await asyncio.sleep(0)
    assert states(core)["b"] is ModelState.LOADING
    await core.unload_model("b")
    await asyncio.gather(loading, return_exceptions=True)
    assert "b" not in states(core)
    assert {model for model, _ in promised(core)} == {"a"}


async def test_a_pause_while_it_loads_pauses_it(core: EngineCore) -> None:
    loading = asyncio.ensure_future(core.load_model(load("b")))
    # Its name is taken before anything is read.
    await asyncio.sleep(0)
    assert states(core)["b"] is ModelState.LOADING
    await core.control.sleep(1, mode="keep")  # type: ignore[arg-type]
    await loading
    waiting = asyncio.ensure_future(answer(core, "b"))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await core.control.wake_up()
    assert (await waiting).tokens == (await answer(core, "a")).tokens


@pytest.fixture
async def empty() -> AsyncIterator[EngineCore]:
    """Yield a server all of whose models were unloaded."""
    core = started("a")
    await core.unload_model("a")
    yield core
    core.stop()


async def rounds(core: EngineCore) -> None:
    """Let the engine thread take more turns than an answer has tokens."""
    for _ in range(20):
        await core.call(ListVersions())


async def asleep_in(core: EngineCore, name: str) -> list[str]:
    return await core.call(Do(lambda loop: sorted(loop.engines[name].live.asleep)))


async def test_a_pause_without_models_pauses_the_next_one(empty: EngineCore) -> None:
    await empty.control.pause(PauseMode.KEEP)
    await empty.load_model(load("b"))
    waiting = asyncio.ensure_future(answer(empty, "b"))
    await rounds(empty)
    assert not waiting.done()
    await empty.control.resume()
    assert len((await waiting).tokens) == 6
    await empty.load_model(load("c"))
    assert len((await answer(empty, "c")).tokens) == 6


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
async def test_a_model_that_loads_alone_sleeps_with_the_server(
    empty: EngineCore, level: int
) -> None:
    loading = asyncio.ensure_future(empty.load_model(load("b")))
    # Its name is taken before anything is read.
    await asyncio.sleep(0)
    assert states(empty)["b"] is ModelState.LOADING
    await empty.control.sleep(level, PauseMode.KEEP)
    await loading
    assert await asleep_in(empty, "b") == ["kv_cache", "weights"]
    waiting = asyncio.ensure_future(answer(empty, "b"))
    assert await empty.control.wake_up(["weights"]) == ["kv_cache"]
    await rounds(empty)
    assert not waiting.done()
    assert await empty.control.wake_up() == []
    assert len((await waiting).tokens) == 6


@pytest.mark.slow
async def test_a_model_loads_as_far_asleep_as_the_server_is(empty: EngineCore) -> None:
    loading = asyncio.ensure_future(empty.load_model(load("b")))
    await asyncio.sleep(0)
    await empty.control.sleep(2, PauseMode.KEEP)
    assert await empty.control.wake_up(["weights"]) == ["kv_cache"]
    await loading
    assert await asleep_in(empty, "b") == ["kv_cache"]
    assert await empty.control.wake_up() == []
    assert len((await answer(empty, "b")).tokens) == 6
