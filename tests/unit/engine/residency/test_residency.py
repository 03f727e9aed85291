"""Models in memory: waiting requests share a load; the least recently used is evicted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlx_parallm.config import EngineConfig, LoadingConfig, ModelConfig
from mlx_parallm.engine.core import EngineCore
from mlx_parallm.engine.directory import ModelDirectory
from mlx_parallm.engine.kind import MemoryLimit, MemoryWish, StartedModel
from mlx_parallm.engine.ledger import WEIGHTS, Ledger
from mlx_parallm.engine.loader import ModelLoader, Promise
from mlx_parallm.engine.model_entry import ModelEntry
from mlx_parallm.engine.policies import NamedAdapter
from mlx_parallm.engine.residency import Residency
from mlx_parallm.engine.status import ModelState
from mlx_parallm.pooling.model import POOLING_TRAITS, PoolingModel
from mlx_parallm.types.errors import ModelLoadError, ModelNotFoundError, NoRoomError
from mlx_parallm.types.pooling import PoolingInfo
from tests.fakes import ByteTokenizer
from tests.virtual_time import in_virtual_time

SIZES = {"a": 10, "b": 20, "c": 30, "d": 100}


class ScriptedLoader(ModelLoader):
    """A load goes on when the test says so."""

    async def forget(self, name: str) -> None:
        self.events.append(f"forget {name}")

    def __init__(self) -> None:
        self.events: list[str] = []
        self.in_memory: set[str] = set()
        self.peak = 0
        self.failure: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.begun = asyncio.Event()

    async def load(
        self,
        config: ModelConfig,
        names: tuple[str, ...],
        promise: Promise,
        on_progress: Callable[[float], None],
    ) -> PoolingModel:
        name = names[0]
        self.events.append(f"load {name}")
        await promise(WEIGHTS, MemoryWish.exactly(SIZES[name]), POOLING_TRAITS)
        on_progress(0.5)
        self.begun.set()
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        self.in_memory.add(name)
        self.peak = max(self.peak, sum(SIZES[other] for other in self.in_memory))
        return pooling_model(names, SIZES[name])

    async def drop(self, name: str) -> None:
        self.events.append(f"drop {name}")
        self.in_memory.remove(name)


def pooling_model(names: tuple[str, ...], num_bytes: int) -> PoolingModel:
    info = PoolingInfo(
        architecture="x",
        vocab_size=9,
        max_model_len=9,
        dims=2,
        dtype="float32",
        weight_bytes=num_bytes,
    )
    tokenizer: Any = ByteTokenizer()
    return PoolingModel(
        names=names,
        root="r",
        created=1,
        tokenizer=tokenizer,
        info=info,
        max_batch_tokens=64,
        max_waiting=100,
    )


def residency_of(loader: ScriptedLoader, max_bytes: int | None) -> Residency:
    limit = max_bytes and MemoryLimit(max_bytes, "Pooling models", "--pooling-memory-bytes")
    ledger = Ledger({POOLING_TRAITS.name: limit} if limit else {})
    return Residency(loader, ledger, LoadingConfig(), read_limit=no_limit)


async def no_limit() -> None:
    return None


def make(
    max_bytes: int | None = None, names: str = "abc"
) -> tuple[Residency, ScriptedLoader, list[ModelEntry]]:
    loader = ScriptedLoader()
    residency = residency_of(loader, max_bytes)
    entries = [ModelEntry(ModelConfig(path=name), (name, name * 2)) for name in names]
    for entry in entries:
        residency.add(entry)
    return residency, loader, entries


async def use(residency: Residency, entry: ModelEntry) -> None:
    await residency.begin(entry)
    loader: Any = residency._loader
    # This holds even while it waits to be evicted.
    assert entry.names[0] in loader.in_memory
    residency.end(entry)


async def settle() -> None:
    """Let every task run as far as it can, beyond the time that a new model stays at least."""
    await asyncio.sleep(2)


@in_virtual_time
async def test_all_who_wait_share_one_load_and_see_its_progress() -> None:
    residency, loader, (a, *_) = make()
    assert a.status().state is ModelState.EVICTED
    loader.gate.clear()
    waiting = [asyncio.create_task(use(residency, a)) for _ in range(5)]
    await loader.begun.wait()
    assert (a.status().state, a.status().progress) == (ModelState.LOADING, 0.5)
    loader.gate.set()
    await asyncio.gather(*waiting)
    assert (a.status().state, a.status().progress) == (ModelState.LOADED, 1.0)
    assert loader.events == ["load a"]


@in_virtual_time
async def test_a_failed_load_tells_all_who_wait_and_the_next_request_tries_again() -> None:
    residency, loader, (a, *_) = make()
    loader.gate.clear()
    loader.failure = ModelLoadError("the file is broken")
    waiting = [asyncio.create_task(use(residency, a)) for _ in range(3)]
    await loader.begun.wait()
    loader.gate.set()
    failures = await asyncio.gather(*waiting, return_exceptions=True)
    assert [str(failure) for failure in failures] == ["the file is broken"] * 3
    assert a.status().state is ModelState.EVICTED
    loader.failure = None
    await use(residency, a)
    assert loader.events == ["load a", "load a"]


@in_virtual_time
async def test_who_goes_away_does_not_end_the_load_of_others() -> None:
    residency, loader, (a, *_) = make()
    loader.gate.clear()
    first, second = (asyncio.create_task(use(residency, a)) for _ in range(2))
    await loader.begun.wait()
    first.cancel()
    await asyncio.wait([first])
    loader.gate.set()
    await second
    assert loader.events == ["load a"]


@in_virtual_time
async def test_the_least_recently_used_make_way() -> None:
    residency, loader, (a, b, c) = make(max_bytes=50)
    for entry in (a, b, a):
        await use(residency, entry)
    await use(residency, c)
    assert loader.in_memory == {"a", "c"}
    await use(residency, b)
    # a was used before c, and 10 of its bytes suffice for 20 of 50.
    assert loader.events[-2:] == ["load b", "drop a"]
    assert loader.peak <= 50
    assert a.status().state is ModelState.EVICTED
    assert a.model is not None


@in_virtual_time
async def test_an_encoder_that_runs_is_evicted_only_when_its_requests_have_ended() -> None:
    residency, loader, (a, _, c) = make(max_bytes=30)
    await residency.begin(a)
    other = asyncio.create_task(use(residency, c))
    await settle()
    assert not other.done()
    assert "drop a" not in loader.events
    # A late request of the one that is leaving waits for its next load, and starves nobody.
    late = asyncio.create_task(use(residency, a))
    await settle()
    assert not late.done()
    residency.end(a)
    await other
    await late
    assert loader.events == ["load a", "load c", "drop a", "load a", "drop c"]
    assert loader.peak <= 30


@in_virtual_time
async def test_pinned_ones_stay_and_what_cannot_fit_says_so() -> None:
    residency, loader, (a, b, d) = make(max_bytes=50, names="abd")
    a.is_pinned = True
    await use(residency, a)
    await use(residency, b)
    with pytest.raises(ModelLoadError, match=r"d takes 100 bytes.*stay in memory: a \("):
        await use(residency, d)
    assert loader.in_memory == {"a", "b"}
    b.is_pinned = True
    await use(residency, b)
    residency_full, _, (c, d) = make(max_bytes=30, names="cd")
    c.is_pinned = True
    await use(residency_full, c)
    with pytest.raises(ModelLoadError, match=r"stay in memory: c \("):
        await use(residency_full, d)


@in_virtual_time
async def test_unloading_lets_requests_end_and_admits_no_more() -> None:
    residency, loader, (a, *_) = make()
    await residency.begin(a)
    leaving = asyncio.create_task(residency.unload(a))
    await settle()
    assert not leaving.done()
    assert "a" not in residency.by_name
    assert "aa" not in residency.by_name
    with pytest.raises(ModelNotFoundError):
        await residency.begin(a)
    residency.end(a)
    await leaving
    assert loader.events == ["load a", "drop a", "forget a"]
    assert loader.in_memory == set()


@in_virtual_time
async def test_unloading_during_a_load() -> None:
    residency, loader, (a, b, _) = make()
    loader.gate.clear()
    first = asyncio.create_task(use(residency, a))
    second = asyncio.create_task(use(residency, b))
    await loader.begun.wait()
    leaving = [asyncio.create_task(residency.unload(entry)) for entry in (a, b)]
    await settle()
    loader.gate.set()
    await asyncio.gather(*leaving)
    outcomes = await asyncio.gather(first, second, return_exceptions=True)
    # The request that waited for the load ran before the encoder went; the other had not begun.
    assert outcomes[0] is None
    assert isinstance(outcomes[1], ModelNotFoundError)
    assert loader.in_memory == set()
    assert residency.entries() == [residency.by_name["c"]]


@in_virtual_time
async def test_requests_that_come_in_turn_all_run_though_only_one_encoder_fits() -> None:
    residency, loader, entries = make(max_bytes=30)
    requests = [use(residency, entries[place % 3]) for place in range(30)]
    await asyncio.gather(*requests)
    # All requests of a pooling model ran with its first load.
    assert loader.events.count("load c") == 1
    assert all(entry.num_open == 0 and not entry.waiting for entry in entries)


@in_virtual_time
async def test_who_goes_away_just_when_it_is_let_in_holds_nothing() -> None:
    residency, loader, (a, *_) = make()
    loader.gate.clear()
    request = asyncio.create_task(use(residency, a))
    await loader.begun.wait()
    loader.gate.set()
    loading = a.loading
    assert loading is not None
    # After the load, and before the request runs again.
    loading.add_done_callback(lambda _: request.cancel())
    await asyncio.wait([request])
    await residency.unload(a)
    assert loader.in_memory == set()


class AdapterLoads:
    """In place of ``EngineControl``: an adapter of "a", whose load holds its model when it may."""

    def __init__(self) -> None:
        self.encoders: EngineCore | None = None
        self.names = self
        self.sleep_level = 0
        self.begun, self.gate = asyncio.Event(), asyncio.Event()

    def named(self, name: str) -> NamedAdapter | None:
        return NamedAdapter("x", "a", "folder") if name == "x" else None

    async def ensure_loaded(self, name: str, base: str) -> None:
        assert (name, self.encoders is None) == ("x", False)
        self.begun.set()
        await self.gate.wait()
        assert self.encoders is not None
        async with self.encoders.hold(base):
            pass


@in_virtual_time
async def test_a_model_is_evicted_while_an_adapter_of_it_comes() -> None:
    control = AdapterLoads()
    no_life = SimpleNamespace(put=None)
    encoders = control.encoders = EngineCore(EngineConfig(), (), cast("Any", no_life))
    encoders.control = cast("Any", control)
    residency = residency_of(ScriptedLoader(), 25)
    encoders._residency = residency
    encoders.directory = ModelDirectory(EngineConfig(), residency, cast("Any", control))
    entries = {name: ModelEntry(ModelConfig(), (name,)) for name in "ab"}
    for entry in entries.values():
        residency.add(entry)
    waits = asyncio.ensure_future(encoders.wait("x"))
    await control.begun.wait()
    other = asyncio.ensure_future(residency.begin(entries["b"]))
    await settle()
    control.gate.set()
    await other
    residency.end(entries["b"])
    await waits
    assert entries["a"].is_loaded


def started(name: str, num_bytes: int = 10) -> StartedModel:
    model = pooling_model((name, name * 2), num_bytes)
    return StartedModel(ModelConfig(path=name), model, is_loaded=True)


@in_virtual_time
async def test_unloads_of_one_name_follow_each_other() -> None:
    residency, loader, (a, *_) = make()
    await residency.begin(a)
    first = asyncio.create_task(residency.unload(a))
    await settle()
    again = ModelEntry(ModelConfig(path="a"), ("a",))
    residency.add(again)
    late = asyncio.create_task(residency.begin(again))
    await settle()
    second = asyncio.create_task(residency.unload(again))
    await settle()
    assert not first.done()
    assert not late.done()
    residency.end(a)
    await asyncio.gather(first, second)
    with pytest.raises(ModelNotFoundError):
        await late
    assert loader.in_memory == set()


@in_virtual_time
async def test_an_unload_during_a_load_holds_up_no_other_load() -> None:
    residency, loader, (a, b, _) = make()
    loader.gate.clear()
    reader = asyncio.create_task(residency.begin(a))
    await loader.begun.wait()
    leaving = asyncio.create_task(residency.unload(a))
    loader.gate.set()
    await reader
    await use(residency, b)
    assert not leaving.done()
    residency.end(a)
    await leaving


@pytest.mark.parametrize("why", ["pinned", "changed", "needed"])
@in_virtual_time
async def test_a_model_that_must_stay_by_then_stays(why: str) -> None:
    needed: set[str] = set()
    loader = ScriptedLoader()
    limit = MemoryLimit(30, "Pooling models", "--pooling-memory-bytes")
    ledger = Ledger({POOLING_TRAITS.name: limit})
    residency = Residency(
        loader, ledger, LoadingConfig(), read_limit=no_limit, is_needed=needed.__contains__
    )
    a, c = (ModelEntry(ModelConfig(path=name), (name,)) for name in "ac")
    for entry in (a, c):
        residency.add(entry)
    await residency.begin(a)
    other = asyncio.create_task(use(residency, c))
    await settle()
    a.is_pinned, a.is_changed = why == "pinned", why == "changed"
    needed.update("a" if why == "needed" else "")
    residency.end(a)
    with pytest.raises(ModelLoadError, match=r"stay in memory: a \("):
        await other
    assert loader.in_memory == {"a"}
    await use(residency, a)
    # Its time to live does not end either.
    residency.set_ttl(a, 3)
    await use(residency, a)
    await asyncio.sleep(10)
    assert loader.in_memory == {"a"}


@in_virtual_time
async def test_an_engine_that_was_started_anew_has_its_models_only() -> None:
    residency, loader, (a, b, _) = make()
    a.ttl_s = 5
    await use(residency, a)
    await use(residency, b)
    # The thread dies, and loads what it was started with.
    loader.in_memory = {"a"}
    residency.replace([started("a")])
    assert (a.is_loaded, b.is_loaded) == (True, False)
    assert residency.by_name["aa"] is a
    assert [claim.model for claim in residency.ledger.claims()] == ["a", "a"]
    await residency.begin(a)
    await asyncio.sleep(60)
    assert loader.in_memory == {"a"}
    residency.end(a)
    await asyncio.sleep(60)
    assert loader.in_memory == set()
    assert not residency.ledger.claims()


@in_virtual_time
async def test_what_a_restart_brings_back_of_unloaded_models_goes() -> None:
    residency, loader, (a, *_) = make()
    await use(residency, a)
    await residency.unload(a)
    loader.in_memory = {"a"}
    residency.replace([started("a")])
    assert "a" not in residency.by_name
    await residency.start()
    assert loader.in_memory == set()


@in_virtual_time
async def test_nothing_leaves_for_a_model_that_is_known_to_lack_kv() -> None:
    residency, loader, (a, b, c) = make()
    await use(residency, a)
    residency.ledger.limit = 40
    c.smallest_kv = 11
    with pytest.raises(ModelLoadError, match="c takes 41 bytes"):
        await use(residency, c)
    assert loader.in_memory == {"a"}
    await use(residency, b)


@in_virtual_time
async def test_a_time_from_a_request_holds_for_one_stay() -> None:
    residency, loader, (a, *_) = make()
    a.ttl_s = 100
    await residency.begin(a)
    residency.set_ttl(a, 0)
    residency.end(a)
    await settle()
    assert loader.in_memory == set()
    await use(residency, a)
    await asyncio.sleep(50)
    assert loader.in_memory == {"a"}
    await asyncio.sleep(60)
    assert loader.in_memory == set()


@in_virtual_time
async def test_a_model_that_was_to_leave_in_vain_expires_still() -> None:
    loader = ScriptedLoader()
    limit = MemoryLimit(30, "Pooling models", "--pooling-memory-bytes")
    ledger = Ledger({POOLING_TRAITS.name: limit})
    residency = Residency(loader, ledger, LoadingConfig(wait_s=5), read_limit=no_limit)
    a, b, c = (ModelEntry(ModelConfig(path=name), (name,), ttl_s=30) for name in "abc")
    for entry in (a, b, c):
        residency.add(entry)
    await use(residency, b)
    await residency.begin(a)
    with pytest.raises(NoRoomError, match="a has 1 requests"):
        await use(residency, c)
    assert loader.in_memory == {"a", "b"}
    await asyncio.sleep(60)
    assert loader.in_memory == {"a"}
