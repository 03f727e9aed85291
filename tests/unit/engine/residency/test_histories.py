"""Any history of loads, uses, times to live, pins, failures and cancelled clients.

The promised bytes never exceed the limit and are of models that are there, no model is evicted with
a request open, and nobody waits for ever. Time is virtual, and the engine thread is a fake that
knows what it has in memory.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.config import LoadingConfig, ModelConfig
from mlx_parallm.engine.kind import MemoryLimit, MemoryWish
from mlx_parallm.engine.ledger import KV, WEIGHTS, Ledger
from mlx_parallm.engine.loader import ModelLoader, Promise
from mlx_parallm.engine.model_entry import ModelEntry
from mlx_parallm.engine.models import KindTraits, ModelMemory, ServedModel
from mlx_parallm.engine.residency import Residency
from mlx_parallm.types.errors import (
    ModelLoadError,
    ModelNotFoundError,
    NoRoomError,
    OutOfMemoryError,
)
from tests.virtual_time import run_virtual

LIMIT = 100
OF_KIND = MemoryLimit(40, "Pooling models", "--pooling-memory-bytes")
GENERATION, POOLING = KindTraits(name="generation"), KindTraits(name="pooling")
#: Weights, one context and all that a model wants, by its name; "p…" are pooling models.
SIZES = {
    "a": (20, 10, 60),
    "b": (20, 10, 30),
    "c": (40, 20, 40),
    "d": (70, 30, 30),
    "huge": (101, 1, 1),
    "p": (15, 0, 0),
    "q": (30, 0, 0),
}
CLIENTS = "xyz"
#: How long a request of a history takes at most, in seconds.
MAX_USE_S = 20.0


class FakeModel(ServedModel):
    root, created = "", 0

    def __init__(self, name: str, kv: int) -> None:
        self.names = (name,)
        self.traits = POOLING if name in "pq" else GENERATION
        self.least = SIZES[name][1]
        self.memory_now = ModelMemory(weights=SIZES[name][0], kv=kv)

    @property
    def memory(self) -> ModelMemory:
        return self.memory_now

    @property
    def kv_memory(self) -> tuple[int, int]:
        return self.memory.kv, self.least


class FakeDevice(ModelLoader):
    """Loads models with delays; it compares the commands with what it has."""

    def __init__(self, chance: random.Random) -> None:
        self.in_memory: dict[str, FakeModel] = {}
        self.reading: set[str] = set()
        self.chance = chance
        self.failures = 0.0
        self.open: dict[str, int] = {}
        self.loaded_s: dict[str, float] = {}
        self.must_stay: Callable[[str], bool] = lambda _: False

    async def load(
        self,
        config: ModelConfig,
        names: tuple[str, ...],
        promise: Promise,
        on_progress: Callable[[float], None],
    ) -> ServedModel:
        name = names[0]
        weights, least, wanted = SIZES[name]
        traits = POOLING if name in "pq" else GENERATION
        assert name not in self.in_memory, "it is loaded already"
        assert not self.reading, "two loads at once"
        await self._work()
        await promise(WEIGHTS, MemoryWish.exactly(weights), traits)
        self.reading.add(name)
        try:
            await self._work()
            kv = 0
            if wanted:
                wish = MemoryWish(smallest=least, least=least, wanted=wanted)
                kv = await promise(KV, wish, traits)
                assert least <= kv <= wanted
            await self._work()
        finally:
            self.reading.discard(name)
        model = self.in_memory[name] = FakeModel(name, kv)
        self.loaded_s[name] = asyncio.get_running_loop().time()
        return model

    async def _work(self) -> None:
        await asyncio.sleep(self.chance.choice((0, 0.1, 2)))
        if self.chance.random() < self.failures:
            raise self.chance.choice((ModelLoadError("broken"), OutOfMemoryError("too little")))

    async def drop(self, name: str) -> None:
        assert not self.open.get(name), "it has requests"
        assert not self.must_stay(name), "it was to stay"
        self.in_memory.pop(name, None)
        await asyncio.sleep(self.chance.choice((0, 0.1)))

    async def resize(self, name: str, num_bytes: int) -> ServedModel | None:
        assert not self.open.get(name), "it has requests"
        await asyncio.sleep(self.chance.choice((0, 0.1)))
        if name not in self.in_memory:
            return None
        model = self.in_memory[name] = FakeModel(name, num_bytes)
        return model

    async def forget(self, name: str) -> None:
        await asyncio.sleep(0)


class History:
    """One run: clients that use models, and an operator."""

    def __init__(self, seed: int, failures: float, wait_s: float | None = None) -> None:
        self.chance = random.Random(seed)
        self.device = FakeDevice(self.chance)
        self.device.failures = failures
        self.ledger = Ledger({"pooling": OF_KIND}, LIMIT)
        wait_s = wait_s or self.chance.choice((3, 30))
        config = LoadingConfig(wait_s=wait_s, ttl_s=self.chance.choice((None, 5.0)))
        self.needed: set[str] = set()
        self.residency = Residency(
            self.device,
            self.ledger,
            config,
            read_limit=self.read_limit,
            is_needed=self.needed.__contains__,
        )
        self.device.must_stay = self.must_stay
        for name in SIZES:
            self.add(name)
        self.outcomes: list[str] = []
        self.waits: list[float] = []

    async def read_limit(self) -> int:
        return LIMIT

    def must_stay(self, name: str) -> bool:
        """True if nobody but an operator may have a model leave; one that is gone has no name."""
        entry = self.residency.by_name.get(name)
        is_leaving = name in self.residency._leaving
        return entry is not None and not is_leaving and (entry.is_pinned or name in self.needed)

    def add(self, name: str) -> None:
        self.residency.add(ModelEntry(ModelConfig(path=name), (name,)))

    def check(self) -> None:
        assert self.ledger.promised <= LIMIT
        there = set(self.device.in_memory) | self.device.reading
        for claim in self.ledger.claims():
            loading = {each.name for each in self.residency.entries() if each.loading is not None}
            leaving = {each.name for each in self.residency.entries() if not each.is_loaded}
            assert claim.model in there | loading | leaving | set(self.residency._leaving)
        for name, model in self.device.in_memory.items():
            # All that is in memory is promised, and not less than it takes.
            assert self.ledger.num_bytes(name, WEIGHTS) == model.memory.weights
            assert self.ledger.num_bytes(name, KV) >= min(model.memory.kv, model.least)

    async def use(self, client: str, name: str) -> None:
        loop, chance = asyncio.get_running_loop(), self.chance
        entry = self.residency.by_name.get(name)
        if entry is None:
            self.outcomes.append("unknown")
            return
        began_s = loop.time()
        try:
            await self.residency.begin(entry, client)
        except (ModelLoadError, ModelNotFoundError, NoRoomError, OutOfMemoryError) as problem:
            self.outcomes.append(type(problem).__name__)
            return
        self.waits.append(loop.time() - began_s)
        opened = self.device.open
        opened[name] = opened.get(name, 0) + 1
        try:
            assert name in self.device.in_memory
            for _ in range(chance.randrange(3)):
                await asyncio.sleep(chance.uniform(0, MAX_USE_S / 3))
                assert name in self.device.in_memory
            self.outcomes.append("used")
        finally:
            opened[name] -= 1
            self.residency.end(entry)

    async def client(self, name: str) -> None:
        for _ in range(8):
            task = asyncio.ensure_future(self.use(name, self.chance.choice(list(SIZES))))
            if self.chance.random() < 0.2:
                await asyncio.sleep(self.chance.uniform(0, 5))
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled() or task.exception() is None, task.exception()
            await asyncio.sleep(self.chance.choice((0, 1, 10)))

    async def operator(self) -> None:
        for _ in range(10):
            await asyncio.sleep(self.chance.uniform(0, 20))
            name = self.chance.choice(list(SIZES))
            entry = self.residency.by_name.get(name)
            match self.chance.randrange(6):
                case 0 if entry is None:
                    self.add(name)
                case 1 if entry is not None:
                    await self.residency.unload(entry)
                case 2 if entry is not None:
                    entry.is_pinned = not entry.is_pinned
                case 3 if entry is not None:
                    self.residency.set_ttl(entry, self.chance.choice((None, 0.0, 3.0)))
                case 4:
                    self.needed ^= {name}
                case 5 if entry is not None:
                    # It is listed again while it leaves, and perhaps unloaded once more.
                    leaving = asyncio.ensure_future(self.residency.unload(entry))
                    await asyncio.sleep(self.chance.choice((0, 1)))
                    if name not in self.residency.by_name:
                        self.add(name)
                        if self.chance.random() < 0.5:
                            await self.residency.unload(self.residency.by_name[name])
                    await leaving
                case _:
                    pass

    async def watch(self) -> None:
        while True:
            self.check()
            await asyncio.sleep(0.25)

    async def run(self) -> None:
        watch = asyncio.ensure_future(self.watch())
        work = [self.client(client) for client in CLIENTS]
        done, _ = await asyncio.wait(
            [asyncio.gather(*work, self.operator()), watch], return_when=asyncio.FIRST_COMPLETED
        )
        for each in done:
            each.result()
        watch.cancel()
        # Loads that nobody waits for any more come to their end too.
        await asyncio.sleep(300)
        self.check()
        assert not self.device.reading
        assert not any(self.device.open.values())
        assert {claim.model for claim in self.ledger.claims()} == set(self.device.in_memory)
        assert all(not entry.waiting for entry in self.residency.entries())


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.2]))
def test_any_history(seed: int, failures: float) -> None:
    run_virtual(History(seed, failures).run())


@pytest.mark.slow
@settings(max_examples=1000)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.1, 0.4]))
def test_many_histories(seed: int, failures: float) -> None:
    run_virtual(History(seed, failures).run())


def test_histories_are_not_vacuous() -> None:
    outcomes: set[str] = set()
    for seed in range(10):
        history = History(seed, 0.2)
        run_virtual(history.run())
        outcomes.update(history.outcomes)
    assert outcomes >= {"used", "unknown", "ModelLoadError", "OutOfMemoryError", "NoRoomError"}


def test_nobody_starves_where_two_of_three_fit() -> None:
    async def run() -> None:
        history = History(1, 0.0, wait_s=60)
        history.device.chance = random.Random(1)

        async def one(client: int) -> None:
            chance = random.Random(client)
            for _ in range(30):
                await history.use(str(client), chance.choice("abc"))

        await asyncio.gather(*(one(client) for client in range(16)))
        assert history.outcomes.count("used") == 16 * 30
        # A load waits for the longest request of the model that leaves, and for loads before it.
        loads = sorted(wait for wait in history.waits if wait)
        assert loads[-1] <= 3 * (MAX_USE_S + 10)

    run_virtual(run())
