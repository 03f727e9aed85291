"""Keeps models in memory: they are loaded as requests need them, within a limit of bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from mlx_parallm.config import ModelConfig
from mlx_parallm.engine.kind import MemoryLimit, StartedModel
from mlx_parallm.engine.loader import ModelLoader
from mlx_parallm.engine.models import KindTraits, ServedModel
from mlx_parallm.engine.status import ModelState, ModelStatus
from mlx_parallm.types.errors import ModelLoadError, ModelNotFoundError


@dataclass(slots=True, eq=False)
class ModelEntry:
    """A model that requests may name.

    Attributes:
        config: where it comes from.
        names: the first is the one reported.
        model: what is known about it once it was loaded; it stays while the weights are away.
        is_loaded: True if requests may be sent to the engine thread.
        is_pinned: True if it stays in memory until it is unloaded.
        is_gone: True if it was unloaded: no request may begin any more.
        progress: of the load, from 0 to 1.
        loading: the load that requests wait for.
        waiting: these requests.
        num_open: requests that the engine thread has.
        used: larger for those used later.
        idle: set while ``num_open`` is 0.
    """

    config: ModelConfig
    names: tuple[str, ...]
    model: ServedModel | None = None
    is_loaded: bool = False
    is_pinned: bool = False
    is_gone: bool = False
    progress: float = 0.0
    loading: asyncio.Future[None] | None = None
    waiting: list[asyncio.Future[None]] = field(default_factory=list[asyncio.Future[None]])
    num_open: int = 0
    used: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.idle.set()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of its weights, in memory or not; 0 until it was loaded once."""
        return 0 if self.model is None else self.model.memory.weights

    @property
    def is_movable(self) -> bool:
        """True if it can be evicted and loaded again; a new model is not known to be otherwise."""
        return self.model is None or self.model.traits.loads_later

    def is_of(self, traits: KindTraits) -> bool:
        """True if it is known to be a model of this kind."""
        return self.model is not None and self.model.traits == traits

    def status(self) -> ModelStatus:
        """Return what clients see of it."""
        state, progress = ModelState.EVICTED, 0.0
        if self.is_loaded:
            state, progress = ModelState.LOADED, 1.0
        elif self.loading is not None:
            state, progress = ModelState.LOADING, self.progress
        return ModelStatus(
            names=self.names,
            root=self.config.path or self.names[0],
            state=state,
            progress=progress,
            is_pinned=self.is_pinned,
            model=self.model,
        )


class Residency:
    """Loads and evicts, one model at a time. Lives on the event loop.

    The least recently used ones are evicted if memory is short. A request that finds its model
    evicted begins the load, and all that come meanwhile wait for the same one. Models that cannot
    be loaded later are neither evicted nor counted.
    """

    def __init__(self, loader: ModelLoader, limits: Mapping[str, MemoryLimit]) -> None:
        """Create it without models; ``limits`` are those of kinds, by their names."""
        self._loader = loader
        self._limits = limits
        self._turn = asyncio.Lock()
        self._clock = count(1)
        self.by_name: dict[str, ModelEntry] = {}

    def entries(self) -> list[ModelEntry]:
        """Return all models that requests may name, in the order they were given."""
        return list({id(entry): entry for entry in self.by_name.values()}.values())

    def replace(self, loaded: Sequence[StartedModel]) -> None:
        """Note that the engine thread has loaded these models, and nothing else."""
        entries = [
            ModelEntry(
                started.config, started.model.names, started.model, is_loaded=started.is_loaded
            )
            for started in loaded
        ]
        by_name = {name: entry for entry in entries for name in entry.names}
        others = [entry for entry in self.entries() if entry.names[0] not in by_name]
        for entry in others:
            # It was loaded at run time, before the thread was restarted; its next request loads it.
            entry.is_loaded = False
        self.by_name = by_name | {name: entry for entry in others for name in entry.names}

    def add(self, entry: ModelEntry) -> None:
        """Let requests name a model, whose names are free."""
        self.by_name |= dict.fromkeys(entry.names, entry)

    async def begin(self, entry: ModelEntry) -> None:
        """Have a model in memory for a request, until ``end``.

        Raises:
            ModelNotFoundError: it was unloaded meanwhile.
            ModelLoadError: it cannot be loaded.
        """
        entry.used = next(self._clock)
        if entry.is_loaded:
            self._let_in(entry)
            return
        if entry.is_gone:
            raise ModelNotFoundError(entry.names[0])
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry.waiting.append(waiting)
        if entry.loading is None:
            entry.progress = 0.0
            # The load is a task of its own, because a waiting request may be cancelled.
            entry.loading = asyncio.ensure_future(self._load(entry))
        try:
            await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                # The request was admitted and cancelled before it ran again.
                self.end(entry)
            raise

    def end(self, entry: ModelEntry) -> None:
        """Note that a request that ``begin`` let in is answered."""
        entry.num_open -= 1
        if not entry.num_open:
            entry.idle.set()

    async def unload(self, entry: ModelEntry) -> None:
        """Admit no more requests of a model, wait for those that run, and free its memory."""
        entry.is_gone = True
        self.by_name = {name: other for name, other in self.by_name.items() if other is not entry}
        async with self._turn:
            if entry.is_loaded:
                await self._evict(entry)
            await self._loader.forget(entry.names[0])

    def _let_in(self, entry: ModelEntry) -> None:
        entry.num_open += 1
        entry.idle.clear()

    async def _load(self, entry: ModelEntry) -> None:
        """Load a model, and admit all requests that wait for it before a load can evict it."""
        failure: Exception | None = None
        async with self._turn:
            try:
                await self._bring(entry)
            except Exception as problem:  # noqa: BLE001 - it is raised for the requests that wait
                failure = problem
            entry.loading = None
            waiting, entry.waiting = entry.waiting, []
            for waiter in waiting:
                if waiter.done():
                    continue
                if failure is None:
                    self._let_in(entry)
                    waiter.set_result(None)
                else:
                    waiter.set_exception(failure)

    async def _bring(self, entry: ModelEntry) -> None:
        if entry.is_gone:
            raise ModelNotFoundError(entry.names[0])

        def on_progress(share: float) -> None:
            entry.progress = share

        entry.model = await self._loader.load(
            entry.config,
            entry.names,
            lambda num_bytes, traits: self._make_room(entry, num_bytes, traits),
            on_progress,
        )
        entry.is_loaded = True

    async def _make_room(self, entry: ModelEntry, num_bytes: int, traits: KindTraits) -> None:
        """Evict models of a kind until one more of it fits its limit.

        Raises:
            ModelLoadError: what may be evicted is not enough; then nothing is.
        """
        limit = self._limits.get(traits.name)
        if limit is None:
            return
        loaded = [other for other in self.entries() if other.is_loaded and other.is_of(traits)]
        kept = sum(other.num_bytes for other in loaded if other.is_pinned)
        if num_bytes + kept > limit.num_bytes:
            raise ModelLoadError(
                f"{entry.names[0]} takes {num_bytes} bytes. {limit.owners} may take "
                f"{limit.num_bytes} together ({limit.flag}), and {kept} of them are pinned."
            )
        used = sum(other.num_bytes for other in loaded)
        movable = sorted(
            (other for other in loaded if not other.is_pinned), key=lambda other: other.used
        )
        for other in movable:
            if used + num_bytes <= limit.num_bytes:
                return
            await self._evict(other)
            used -= other.num_bytes

    async def _evict(self, entry: ModelEntry) -> None:
        # Requests that arrive from now on begin another load, which waits for ``_turn``.
        entry.is_loaded = False
        await entry.idle.wait()
        await self._loader.drop(entry.names[0])
