"""One server of a fleet: the change that it has staged, and the state that its changes made."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mlx_parallm.replicas.entries import (
    DECIDED_FIRST,
    GENESIS,
    MIXED,
    UNLOAD_MODEL,
    Entry,
    Journal,
    Rest,
    Step,
    journaled,
    way,
)
from mlx_parallm.replicas.host import Content, Host, StagedChange
from mlx_parallm.replicas.past import Past
from mlx_parallm.replicas.shrinking import needed_names, only, shrunk
from mlx_parallm.types.errors import ConflictError, InvalidRequestError, NotFoundError, ParallmError

logger = logging.getLogger(__name__)

# STAGE_S: a staged change is dropped after this time without a word of its coordinator.
STAGE_S = 60.0
# WAIT_S: time that a change waits for the one before it.
WAIT_S = 10.0
# MAX_ANCESTORS: earlier states that a server knows: a peer in one of them is behind, not different.
MAX_ANCESTORS = 4096
# INLINE_BYTES: tensors up to this size are hashed and cut on the event loop.
INLINE_BYTES = 64 * 1024
DROPPED = "This change was dropped while it was being staged."
#: ``STALE``: code of a refusal because the fleet has changed since the change was numbered.
STALE = "fleet_state"
#: ``BUSY``: code of a refusal because another change is staged.
BUSY = "fleet_busy"


class StaleChangeError(ConflictError):
    """The change follows another state than the server's; its coordinator numbers it anew."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code=STALE)


@dataclass(slots=True)
class _Held:
    """The change that a server has staged, or is staging.

    Attributes:
        entry: the change.
        content: its tensors.
        staging: stages it at the host; None until its tensors have come.
        staged: None until it is staged.
        is_committing: True once it can no longer be dropped.
        is_dropped: True if it was dropped while the host was staging it.
        expires: drops it.
    """

    entry: Entry
    content: Content | None = None
    staging: asyncio.Future[StagedChange] | None = None
    staged: StagedChange | None = None
    is_committing: bool = False
    is_dropped: bool = False
    expires: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class MemberState:
    """The state that a server's changes made.

    Attributes:
        number: of the latest change.
        digest: of all changes.
        journal: what a fresh server needs to be like this one.
        contents: the tensors of the journal's changes, by their digests.
        seen: the largest number of a change that this server has heard of.
        ancestors: digests of earlier states.
    """

    number: int = 0
    digest: str = GENESIS
    journal: Journal = ()
    contents: dict[str, Content] = field(default_factory=dict[str, Content])
    seen: int = 0
    ancestors: dict[str, None] = field(default_factory=dict[str, None])

    def knows(self, digest: str) -> bool:
        """True if this is an earlier state, or the state of a fresh server."""
        return digest in self.ancestors or (digest == GENESIS != self.digest)

    @property
    def is_mixed(self) -> bool:
        """True if the server stopped on its way to another state."""
        return self.digest == MIXED

    def leave(self, target: Journal) -> Sequence[Step]:
        """Return the way to another state. Until its end, the server is in none."""
        steps = way(self.journal, target, is_mixed=self.is_mixed)
        self.journal = tuple({entry.digest: entry for entry in (*self.journal, *target)}.values())
        if not self.is_mixed:
            self.ancestors[self.digest] = None
            self.digest = MIXED
        return steps

    def advance(self, entry: Entry, content: Content | None) -> None:
        """Note that a change was carried out."""
        if entry.content is not None and content is not None:
            self.contents[entry.content] = content
        journal = journaled(self.journal, entry)
        self.move(Past(entry.number, entry.digest, entry.highest, journal))

    @property
    def past(self) -> Past:
        """Return all of it but the tensors, for a server that is to become like this one."""
        return Past(self.number, self.digest, self.seen, self.journal, tuple(self.ancestors))

    def move(self, target: Past) -> None:
        """Note that this server is in another state now."""
        if not self.is_mixed:
            self.ancestors[self.digest] = None
        self.ancestors |= dict.fromkeys(target.ancestors)
        while len(self.ancestors) > MAX_ANCESTORS:
            del self.ancestors[next(iter(self.ancestors))]
        self.ancestors.pop(target.digest, None)
        self.number, self.digest, self.journal = target.number, target.digest, target.journal
        self.seen = max(self.seen, target.number, target.seen)
        self._forget_contents()

    def shrink(self, entry: Entry, names: Sequence[str], content: bytes, digest: str) -> None:
        """Keep these tensors of an entry alone, unless the journal has changed it meanwhile."""
        rest = replace(entry, kept=Rest(tuple(names), digest)) if names else None
        if any(each is entry for each in self.journal):
            self.contents[digest] = content
            self.journal = shrunk(self.journal, entry, rest)
            self._forget_contents()

    def _forget_contents(self) -> None:
        needed = {entry.rest_content for entry in self.journal}
        self.contents = {key: body for key, body in self.contents.items() if key in needed}


class Member:
    """Stages, commits and drops the changes of a fleet at one server; lives on the event loop.

    Attributes:
        host: the server.
        state: the state of its changes.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        self.state = MemberState()
        self._held: _Held | None = None
        self._is_moving = False
        self._freed = asyncio.Event()
        # Changes that count already, and end with requests.
        self._ending: set[asyncio.Future[Any]] = set()
        self._shrinking = asyncio.Lock()

    @property
    def staged(self) -> Entry | None:
        """Return the change that is staged, or is being staged."""
        return None if self._held is None else self._held.entry

    @property
    def is_committing(self) -> bool:
        """True if the staged change can no longer be dropped."""
        return self._held is not None and self._held.is_committing

    @property
    def num_staged_bytes(self) -> int:
        """Return the bytes of the change that is staged."""
        return 0 if self._held is None else len(self._held.content or b"")

    async def stage(
        self,
        entry: Entry,
        content: Content | None,
        staging: Callable[[], Awaitable[StagedChange]] | None = None,
    ) -> None:
        """Stage a change, once the one before it has ended.

        Args:
            entry: the change.
            content: its tensors.
            staging: stages it at the host, where it came from, so that its tensors are known; by
                default the host does so by the entry.

        Raises:
            StaleChangeError: it follows another state than this server's.
            ConflictError: another change is staged, and does not end.
            InvalidRequestError: the tensors are others than the entry names.
            ParallmError: what the host raises.
        """
        held = await self._reserved(entry)
        if held.staged is not None:
            return
        if held.staging is not None:
            raise ConflictError("This change is being staged.", code=BUSY)
        stage = self._stage(entry, content) if staging is None else _called(staging)
        held.staging = asyncio.ensure_future(stage)
        try:
            held.staged, held.content = await held.staging, content
        except BaseException as problem:
            self._free(held)
            if held.is_dropped and isinstance(problem, asyncio.CancelledError):
                raise ConflictError(DROPPED) from problem
            raise
        if held.is_dropped:
            await held.staged.drop()
            raise ConflictError(DROPPED)
        self.renew(entry.digest)

    async def _stage(self, entry: Entry, content: Content | None) -> StagedChange:
        await _check_content(entry, content)
        return await self.host.stage(entry.head, content)

    async def reserve(self, entry: Entry) -> None:
        """Let no other change be staged before this one; raise as ``stage`` does."""
        await self._reserved(entry)

    async def _reserved(self, entry: Entry) -> _Held:
        if self._held is None or self._held.entry.digest != entry.digest:
            await self._wait_until_free()
            if entry.parent != self.state.digest or entry.number <= self.state.seen:
                raise StaleChangeError(
                    f"The change {entry.number} does not follow the state of this server, which "
                    f"is at change {self.state.number} and has heard of {self.state.seen}."
                )
            self._held = _Held(entry)
            self.state.seen = entry.highest
            self.renew(entry.digest)
        return self._held

    async def commit(self, digest: str) -> Any:
        """Carry out the staged change; return its result, or None if that was done before.

        Raises:
            ConflictError: it is not staged here, perhaps no longer.
            ParallmError: what the host raises; nothing has changed.
        """
        if digest == self.state.digest or self.state.knows(digest):
            return None
        held = self._held
        if held is None or held.entry.digest != digest or held.staged is None:
            raise ConflictError("This change is not staged here: it was never, or has expired.")
        if held.is_committing:
            raise ConflictError("This change is being committed.", code=BUSY)
        held.is_committing = True
        if held.entry.kind in DECIDED_FIRST:
            self.state.advance(held.entry, held.content)
            self._free(held)
            return await held.staged.commit()
        try:
            result = await held.staged.commit()
            self.state.advance(held.entry, held.content)
            self._end_later(self._shrink())
        finally:
            self._free(held)
        return result

    async def drop(self, digest: str) -> None:
        """Forget the staged change if it is this one and is not being committed."""
        held = self._held
        if held is None or held.entry.digest != digest or held.is_committing:
            return
        if held.staged is None:
            # A host that never ends keeps no other change from being staged.
            held.is_dropped = True
            if held.staging is not None:
                held.staging.cancel()
            self._free(held)
        else:
            held.is_committing = True
            try:
                await held.staged.drop()
            finally:
                self._free(held)

    def renew(self, digest: str) -> None:
        """Keep the staged change for as long again, if it is this one."""
        held = self._held
        if held is None or held.entry.digest != digest:
            return
        if held.expires is not None:
            held.expires.cancel()
        loop = asyncio.get_running_loop()
        held.expires = loop.call_later(STAGE_S, self._expire, digest)

    def _expire(self, digest: str) -> None:
        logger.warning("a staged change was neither committed nor dropped; it is dropped")
        dropping = asyncio.ensure_future(self.drop(digest))
        dropping.add_done_callback(_report)

    @contextlib.asynccontextmanager
    async def moving(self) -> AsyncGenerator[MemberState]:
        """Let the block bring this server to another state; nothing is staged meanwhile."""
        await self._wait_until_free()
        self._is_moving = True
        try:
            yield self.state
        finally:
            self._is_moving = False
            self._freed.set()

    def forget(self) -> None:
        """Note that the engines were started anew: no change is left there."""
        self.state = MemberState(seen=self.state.seen)
        if self.staged is not None:
            self._expire(self.staged.digest)

    async def carry_out(self, head: Mapping[str, Any], content: Content | None) -> None:
        """Stage a change at the host and commit it, within ``moving``."""
        committing = (await self.host.stage(head, content)).commit()
        if head["kind"] == UNLOAD_MODEL:
            # It ends with the requests of its model; the fleet does not wait for these either.
            self._end_later(committing)
        else:
            await committing

    async def commit_staged(self, entry: Entry) -> None:
        """``commit`` a change that others have committed; return once it counts here, too."""
        committing = self.commit(entry.digest)
        if entry.kind in DECIDED_FIRST:
            self._end_later(committing)
            await asyncio.sleep(0)
        else:
            await committing

    async def shrunk(self) -> None:
        """Return once the journal holds nothing that later changes have replaced."""
        await asyncio.gather(*self._ending)

    async def _shrink(self) -> None:
        """Free the tensors of the journal that later updates have replaced."""
        state = self.state
        async with self._shrinking:
            for digest, names in needed_names(state.journal).items():
                if self._is_moving or state.is_mixed:
                    return
                entry = next((each for each in state.journal if each.digest == digest), None)
                content = None if entry is None else state.contents.get(entry.rest_content or "")
                if entry is not None and content is not None:
                    is_small = len(content) <= INLINE_BYTES
                    cut = partial(only, content, names)
                    rest = cut() if is_small else await asyncio.to_thread(cut)
                    state.shrink(entry, names, rest, await hashed(rest))

    def _end_later(self, work: Coroutine[Any, Any, Any]) -> None:
        ending = asyncio.ensure_future(work)
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        ending.add_done_callback(_report)

    def content(self, digest: str) -> Content:
        """Return the tensors of a change of the journal; raise NotFoundError if there are none."""
        content = self.state.contents.get(digest)
        if content is None:
            raise NotFoundError("No change of the journal has this content.", param="digest")
        return content

    async def _wait_until_free(self) -> None:
        """Return once no change is staged; raise ConflictError if that takes too long."""
        try:
            async with asyncio.timeout(WAIT_S):
                while self._held is not None or self._is_moving:
                    self._freed.clear()
                    await self._freed.wait()
        except TimeoutError:
            raise ConflictError(self._before(), code=BUSY) from None

    def _before(self) -> str:
        if self.staged is None:
            return "This server is catching up with its fleet; try again."
        return (
            f"The change {self.staged.number} ({self.staged.kind}), which "
            f"{self.staged.coordinator} coordinates, is before this one and has not ended."
        )

    def _free(self, held: _Held) -> None:
        if held.expires is not None:
            held.expires.cancel()
        if self._held is held:
            self._held = None
            self._freed.set()


async def _called(staging: Callable[[], Awaitable[StagedChange]]) -> StagedChange:
    return await staging()


async def _check_content(entry: Entry, content: Content | None) -> None:
    """Raise InvalidRequestError unless the content is that of the entry."""
    if entry.content is None and not content:
        return
    if await hashed(content or b"") != entry.content:
        raise InvalidRequestError("The tensors have another digest than the change says.")


async def hashed(content: Content) -> str:
    """Return the ``content_digest`` without holding up the event loop."""
    if len(content) <= INLINE_BYTES:
        return content_digest(content)
    return await asyncio.to_thread(content_digest, content)


def content_digest(content: Content) -> str:
    """Return the SHA-256 of the tensors of a change, in hex."""
    return hashlib.sha256(content).hexdigest()


def _report(done: asyncio.Future[Any]) -> None:
    if not done.cancelled() and isinstance(problem := done.exception(), ParallmError):
        logger.warning("a change did not end well: %s", problem)
