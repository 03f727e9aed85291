"""Keeps models in memory: they are loaded as requests need them, within a limit of bytes."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from itertools import count
from typing import Any

from mlx_parallm.config import LoadingConfig
from mlx_parallm.engine.kind import MemoryWish, StartedModel
from mlx_parallm.engine.known_models import KnownModels
from mlx_parallm.engine.ledger import KV, WEIGHTS, Claim, Ledger
from mlx_parallm.engine.load_turns import LoadTurns
from mlx_parallm.engine.loader import ModelLoader
from mlx_parallm.engine.model_entry import ModelEntry
from mlx_parallm.engine.models import KindTraits, ServedModel
from mlx_parallm.engine.room import RoomMaker
from mlx_parallm.types.errors import ModelNotFoundError, OutOfMemoryError

logger = logging.getLogger(__name__)

# RECHECK_S: seconds until it is looked again whether a model may expire that must stay.
RECHECK_S = 10.0


class Residency(KnownModels):
    """Loads and evicts, one model at a time. Lives on the event loop.

    A request that finds its model evicted begins the load, for which all wait that come meanwhile.
    See ``RoomMaker`` for what is evicted, and ``LoadTurns`` for the order of loads.

    Attributes:
        ledger: the memory that is promised to them.
    """

    def __init__(
        self,
        loader: ModelLoader,
        ledger: Ledger,
        config: LoadingConfig,
        *,
        read_limit: Callable[[], Awaitable[int | None]],
        is_needed: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Create it without models.

        Args:
            loader: loads them.
            ledger: counts their memory.
            config: the settings.
            read_limit: asks the engines for the ledger's limit.
            is_needed: see ``RoomMaker``.
        """
        super().__init__(config.ttl_s)
        self._loader = loader
        self._turns = LoadTurns()
        self._clock = count(1)
        self._tasks: set[asyncio.Future[None]] = set()
        # Set once a model that is being unloaded is gone, by its first name.
        self._leaving: dict[str, asyncio.Event] = {}
        # The first names of the models that were loaded at the start, and unloaded since.
        self._unloaded: set[str] = set()
        self._read_limit = read_limit
        self._is_settled = False
        self.ledger = ledger
        self._room = RoomMaker(
            ledger,
            self.entries,
            evict=self._evict,
            resize=loader.resize,
            arm=lambda entry: entry.arm(self._expire),
            is_needed=is_needed,
            config=config,
        )

    def replace(self, loaded: Sequence[StartedModel]) -> None:
        """Note that the engine thread has loaded these models, and nothing else."""
        before = {entry.name: entry for entry in self.entries()}
        for entry in before.values():
            # What was loaded at run time is loaded again by its next request.
            entry.is_loaded = False
            entry.disarm()
        entries: list[ModelEntry] = []
        for started in loaded:
            name = started.model.names[0]
            if name not in self._unloaded:
                entry = before.pop(name, None) or ModelEntry(started.config, started.model.names)
                entry.model, entry.is_loaded = started.model, started.is_loaded
                entry.is_changed, entry.full_kv = False, 0
                entries.append(entry)
        self.by_name = {}
        for entry in (*entries, *before.values()):
            self.add(entry)
        claims = [claim for entry in entries if entry.is_loaded for claim in _claims(entry)]
        self.ledger.restart(claims, None)
        self._is_settled = False

    async def settle(self) -> None:
        """Unload what was unloaded before a restart, and bound the memory of models."""
        if self._is_settled:
            return
        for name in sorted(self._unloaded):
            await self._loader.drop(name)
        limit = await self._read_limit()
        self.ledger.restart(self.ledger.claims(), limit)
        self._is_settled = True
        self._arm_all()

    async def start(self) -> None:
        """``settle``, and begin the time to live of models that were loaded at the start."""
        self._arm_all()
        async with self._turns.turn():
            await self.settle()

    def _arm_all(self) -> None:
        for entry in self.entries():
            entry.arm(self._expire)

    async def begin(self, entry: ModelEntry, client: str = "") -> None:
        """Have a model in memory for a request of a client, until ``end``.

        Raises:
            ModelNotFoundError: it was unloaded meanwhile.
            ModelLoadError, NoRoomError: it cannot be loaded.
        """
        entry.used = next(self._clock)
        if entry.is_gone:
            raise ModelNotFoundError(entry.name)
        if entry.is_loaded:
            entry.enter()
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry.waiting.append(waiting)
        if entry.loading is None:
            entry.progress = 0.0
            # The load is a task of its own, because a waiting request may be cancelled.
            entry.loading = self._spawn(self._load(entry, client))
        try:
            await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                # The request was admitted and cancelled before it ran again.
                self.end(entry)
            raise

    def end(self, entry: ModelEntry) -> None:
        """Note that a request that ``begin`` let in is answered; its time to live begins."""
        entry.leave()
        entry.arm(self._expire)

    async def unload(self, entry: ModelEntry) -> None:
        """Admit no more requests of a model, wait for those that run, and free its memory.

        A model of the same name that comes meanwhile is loaded, or unloaded, after that.
        """
        self.remove(entry)
        while (earlier := self._leaving.get(entry.name)) is not None:
            await earlier.wait()
        left = self._leaving[entry.name] = asyncio.Event()
        try:
            # Loads of other models need not wait for its requests.
            is_gone = False
            while not is_gone:
                await entry.idle.wait()
                async with self._turns.turn():
                    is_gone = not entry.num_open
                    if is_gone:
                        await self._leave(entry)
        finally:
            del self._leaving[entry.name]
            left.set()

    async def _leave(self, entry: ModelEntry) -> None:
        if entry.is_loaded:
            await self._evict(entry)
        await self._loader.forget(entry.name)
        self._unloaded.add(entry.name)
        await self._room.grow_idle()

    def set_ttl(self, entry: ModelEntry, ttl_s: float | None) -> None:
        """Evict a model once, after so many idle seconds; None: never.

        The request that brought the time was admitted, and may have ended already.
        """
        entry.stay_s = math.inf if ttl_s is None else ttl_s
        entry.arm(self._expire)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _expire(self, entry: ModelEntry) -> None:
        self._spawn(self._evict_expired(entry))

    async def _evict_expired(self, entry: ModelEntry) -> None:
        """Evict a model unless a request came, or its time to live was changed, meanwhile."""
        async with self._turns.turn():
            is_due = entry.expires_s <= asyncio.get_running_loop().time()
            if not is_due or not entry.is_loaded or entry.num_open:
                return
            if not self._room.may_leave(entry):
                entry.arm(self._expire, RECHECK_S)
                return
            logger.info("%s is evicted, as it was idle for %g s", entry.name, entry.stays_s)
            await self._evict(entry)
            await self._room.grow_idle()

    async def _load(self, entry: ModelEntry, client: str) -> None:
        """Load a model, and admit all requests that wait for it before a load can evict it."""
        failure: Exception | None = None
        # A model of the same name may have requests that end before it leaves.
        while (left := self._leaving.get(entry.name)) is not None and not entry.is_gone:
            await left.wait()
        async with self._turns.turn(client):
            try:
                await self.settle()
                if not entry.is_loaded:
                    await self._bring(entry)
            except Exception as problem:  # noqa: BLE001 - it is raised for the requests that wait
                failure = problem
            entry.loading = None
            waiting, entry.waiting = entry.waiting, []
            for waiter in waiting:
                if waiter.done():
                    continue
                if failure is None:
                    entry.enter()
                    waiter.set_result(None)
                else:
                    waiter.set_exception(failure)
            entry.arm(self._expire)

    async def _bring(self, entry: ModelEntry) -> None:
        """Load a model; once more with all idle ones evicted if the device lacks the memory."""
        if entry.is_gone:
            raise ModelNotFoundError(entry.name)
        try:
            entry.model = await self._read(entry)
        except OutOfMemoryError:
            idle = [each for each in self.entries() if self._room.is_idle(each)]
            if not idle:
                raise
            for each in idle:
                await self._evict(each)
            entry.model = await self._read(entry)
        entry.is_loaded, entry.progress, entry.full_kv = True, 1.0, 0
        entry.loaded_s = asyncio.get_running_loop().time()
        self._unloaded.discard(entry.name)

    async def _read(self, entry: ModelEntry) -> ServedModel:
        def on_progress(share: float) -> None:
            entry.progress = share

        async def promise(what: str, wish: MemoryWish, traits: KindTraits) -> int:
            return await self._room.promise(entry, what, wish, traits)

        try:
            return await self._loader.load(entry.config, entry.names, promise, on_progress)
        except BaseException:
            self.ledger.release(entry.name)
            raise

    async def _evict(self, entry: ModelEntry) -> None:
        # Requests that arrive from now on begin another load, which waits for its turn.
        entry.is_loaded, entry.stay_s = False, None
        entry.disarm()
        await entry.idle.wait()
        await self._loader.drop(entry.name)
        self.ledger.release(entry.name)


def _claims(entry: ModelEntry) -> list[Claim]:
    assert entry.model is not None, "it is loaded"
    parts = {WEIGHTS: entry.model.memory.weights, KV: entry.model.kv_memory[0]}
    kind = entry.model.traits.name
    return [
        Claim(model=entry.name, kind=kind, what=what, num_bytes=size)
        for what, size in parts.items()
    ]
