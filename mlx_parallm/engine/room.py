"""Makes room in the ledger for a model that is loaded: others give back memory, or are evicted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from mlx_parallm.config import LoadingConfig
from mlx_parallm.engine.kind import MemoryWish
from mlx_parallm.engine.ledger import KV, WEIGHTS, Claim, Ledger
from mlx_parallm.engine.model_entry import ModelEntry
from mlx_parallm.engine.models import KindTraits, ServedModel
from mlx_parallm.types.errors import ModelLoadError, NoRoomError, ParallmError
from mlx_parallm.units import readable_bytes

logger = logging.getLogger(__name__)


class RoomMaker:
    """Promises memory to models. Only one load may ask at a time. It belongs to the event loop.

    Idle models give back KV beyond one context first. Then models are evicted: idle ones, the least
    recently used first, and if these do not suffice, those that were loaded the longest time ago
    once their requests have ended; new requests of these wait meanwhile.
    """

    def __init__(
        self,
        ledger: Ledger,
        entries: Callable[[], Sequence[ModelEntry]],
        *,
        evict: Callable[[ModelEntry], Awaitable[None]],
        resize: Callable[[str, int], Awaitable[ServedModel | None]],
        arm: Callable[[ModelEntry], None],
        is_needed: Callable[[str], bool],
        config: LoadingConfig,
    ) -> None:
        """Prepare.

        Args:
            ledger: has the claims.
            entries: returns all models.
            evict: frees the memory of an idle model, and its claims.
            resize: see ``ModelLoader.resize``.
            arm: begins the time to live of an idle model.
            is_needed: True if work that is no request needs the model of this first name.
            config: has the times to wait.
        """
        self._ledger = ledger
        self._entries = entries
        self._evict = evict
        self._resize_kv = resize
        self._arm = arm
        self._is_needed = is_needed
        self._config = config

    async def promise(
        self, entry: ModelEntry, what: str, wish: MemoryWish, traits: KindTraits
    ) -> int:
        """Promise memory for a part of a model; return its bytes.

        Raises:
            ModelLoadError: it would not fit if everything left that may; nothing is evicted.
            NoRoomError: requests of the models that could be evicted have not ended in time.
        """

        def claim(num_bytes: int) -> Claim:
            return Claim(model=entry.name, kind=traits.name, what=what, num_bytes=num_bytes)

        # Nothing leaves for a model that will lack KV, as far as an earlier load has shown that.
        besides = entry.smallest_kv if what == WEIGHTS else 0
        if what == KV:
            entry.smallest_kv = wish.smallest
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._config.wait_s
        while True:
            leaving = [
                each for each in self._entries() if each is not entry and self.may_leave(each)
            ]
            least = self._attainable(claim(wish.least + besides), leaving) - besides
            if least < wish.smallest:
                raise ModelLoadError(self._why_never(claim(wish.smallest + besides)))
            if not self._ledger.lack(claim(least)):
                break
            await self._free(entry, claim(least), leaving, deadline_s)
        room = self._ledger.room(claim(wish.wanted))
        num_bytes = wish.wanted if room is None else min(wish.wanted, room)
        self._ledger.promise(claim(num_bytes))
        return num_bytes

    def _attainable(self, claim: Claim, leaving: Sequence[ModelEntry]) -> int:
        """Return the bytes of a claim that can be had once all models left that may."""
        claims = [each for entry in leaving for each in self._ledger.claims(entry.name)]
        missing = self._ledger.lack(claim).without(claims, claim)
        return claim.num_bytes - max(missing.total, missing.of_kind)

    def may_leave(self, entry: ModelEntry) -> bool:
        """True if a model is in memory, and can be evicted once its requests have ended."""
        return entry.is_loaded and not self._stays(entry)

    def is_idle(self, entry: ModelEntry) -> bool:
        """True if a model can be evicted now."""
        return self.may_leave(entry) and not entry.num_open

    def _stays(self, entry: ModelEntry) -> bool:
        return entry.must_stay or self._is_needed(entry.name)

    async def _free(
        self, entry: ModelEntry, claim: Claim, leaving: Sequence[ModelEntry], deadline_s: float
    ) -> None:
        """Have models give back memory, or leave; that may not suffice if some must stay by then.

        Raises:
            NoRoomError: requests have not ended in time.
        """
        if self._ledger.lack(claim).total:
            for other in self._by_use(leaving):
                if self._ledger.lack(claim) and self.is_idle(other):
                    await self._shrink(other)
        leaving = [each for each in leaving if self.may_leave(each)]
        idle = [each for each in self._by_use(leaving) if not each.num_open]
        busy = sorted((each for each in leaving if each.num_open), key=lambda each: each.loaded_s)
        victims = self._enough(claim, [*idle, *busy])
        if victims:
            names = ", ".join(victim.name for victim in victims)
            logger.info("%s is loaded in place of %s", entry.name, names)
            await self._let_leave(entry, victims, claim, deadline_s)

    @staticmethod
    def _by_use(entries: Sequence[ModelEntry]) -> list[ModelEntry]:
        return sorted(entries, key=lambda each: each.used)

    def _enough(self, claim: Claim, candidates: Sequence[ModelEntry]) -> list[ModelEntry]:
        """Return the first candidates that make room together; those that do not help stay."""
        lack, victims = self._ledger.lack(claim), list[ModelEntry]()
        for each in candidates:
            without = lack.without(self._ledger.claims(each.name), claim)
            if lack and without != lack:
                victims.append(each)
                lack = without
        return victims

    async def _let_leave(
        self, entry: ModelEntry, victims: Sequence[ModelEntry], claim: Claim, deadline_s: float
    ) -> None:
        """Evict models once they are idle, or none of them if that takes too long.

        Those that must stay by then do.
        """
        loop = asyncio.get_running_loop()
        settled_s = max(victim.loaded_s for victim in victims) + self._config.min_use_s
        if (wait_s := settled_s - loop.time()) > 0:
            await asyncio.sleep(wait_s)
        victims = [victim for victim in victims if self.may_leave(victim)]
        for victim in victims:
            # Requests that arrive from now on begin another load, which waits for its turn.
            victim.is_loaded = False
        try:
            async with asyncio.timeout_at(deadline_s):
                for victim in victims:
                    await victim.idle.wait()
        except TimeoutError:
            raise NoRoomError(self._why_not_now(entry, claim, victims)) from None
        else:
            for victim in victims:
                if not self._stays(victim):
                    await self._evict(victim)
        finally:
            for victim in victims:
                # Those that have their memory still serve again.
                victim.is_loaded = bool(self._ledger.claims(victim.name))
                self._arm(victim)

    def _why_never(self, claim: Claim) -> str:
        limit = self._ledger.limits.get(claim.kind)
        total = self._ledger.limit
        stays = ", ".join(
            f"{each.name} ({readable_bytes(self._bytes_of(each))})"
            for each in self._entries()
            if each.is_loaded and self._stays(each)
        )
        lack = self._ledger.lack(claim)
        if lack.of_kind and limit is not None:
            bound = f"{limit.owners} may take {limit.num_bytes} bytes together ({limit.flag})"
        else:
            bound = f"models may take {total} bytes (--memory)"
        return f"{claim.model} takes {claim.num_bytes} bytes for its {claim.what}; {bound}" + (
            f", and these stay in memory: {stays}." if stays else "."
        )

    def _why_not_now(self, entry: ModelEntry, claim: Claim, victims: Sequence[ModelEntry]) -> str:
        held = ", ".join(
            f"{each.name} has {each.num_open} requests and {readable_bytes(self._bytes_of(each))}"
            for each in victims
            if each.num_open
        )
        return (
            f"There is no room for {entry.name}, which needs {readable_bytes(claim.num_bytes)} for "
            f"its {claim.what}: {held}; they have not ended within {self._config.wait_s:g} s "
            "(--model-wait-s)."
        )

    def _bytes_of(self, entry: ModelEntry) -> int:
        return sum(claim.num_bytes for claim in self._ledger.claims(entry.name))

    async def _shrink(self, entry: ModelEntry) -> None:
        """Let an idle model give back KV beyond one context; it gets that back later."""
        assert entry.model is not None, "it is loaded"
        num_bytes, least = entry.model.kv_memory
        if least < num_bytes:
            entry.full_kv = max(entry.full_kv, num_bytes)
            await self._resize(entry, least)

    async def grow_idle(self) -> None:
        """Give idle models the KV back that they gave for others, as far as there is room."""
        for entry in sorted(self._entries(), key=lambda each: -each.used):
            if not self.is_idle(entry) or entry.model is None:
                continue
            num_bytes, _ = entry.model.kv_memory
            kind = entry.model.traits.name
            claim = Claim(model=entry.name, kind=kind, what=KV, num_bytes=entry.full_kv)
            room = self._ledger.room(claim)
            wanted = entry.full_kv if room is None else min(entry.full_kv, room)
            if wanted > num_bytes:
                await self._resize(entry, wanted)

    async def _resize(self, entry: ModelEntry, num_bytes: int) -> None:
        """Give an idle model so many bytes of KV; its requests wait meanwhile."""
        assert entry.model is not None, "it is loaded"
        claim = Claim(model=entry.name, kind=entry.model.traits.name, what=KV, num_bytes=num_bytes)
        before = self._ledger.num_bytes(entry.name, KV)
        if num_bytes > before:
            self._ledger.promise(claim)
        # Requests that arrive from now on wait for their turn, as for a load.
        entry.is_loaded = False
        try:
            model = await self._resize_kv(entry.name, num_bytes)
        except ParallmError:
            # It has no pool any more; its next request loads it again.
            logger.exception("the KV of %s cannot change; it is evicted", entry.name)
            await self._evict(entry)
            return
        entry.is_loaded, entry.model = True, model or entry.model
        after = before if model is None else model.kv_memory[0]
        self._ledger.promise(replace(claim, num_bytes=after))
        self._arm(entry)
