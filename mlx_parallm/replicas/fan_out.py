"""Carries out a change at all servers of a fleet, or at none."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_parallm.replicas.entries import DECIDED_FIRST, Entry, Head
from mlx_parallm.replicas.fleet import Fleet
from mlx_parallm.replicas.host import Content, StagedChange
from mlx_parallm.replicas.member import STALE, StaleChangeError
from mlx_parallm.replicas.peers import Peer
from mlx_parallm.replicas.transport import Transport
from mlx_parallm.types.errors import (
    ConflictError,
    ParallmError,
    PeerRefusedError,
    PeerSilentError,
    VersionMismatchError,
)

logger = logging.getLogger(__name__)

# RETRY_S: time within which a change is numbered anew because another one came before it.
RETRY_S = 30.0
PAUSE_S = 0.1
# STEP_S: time that a peer has to stage or commit a change, beside that for its tensors. It may have
# to load a model.
STEP_S = 900.0
# BYTES_PER_S: the slowest link that tensors travel over.
BYTES_PER_S = 4e6
PRECONDITION_FAILED = 412

#: ``Stage``: stages a change at this server.
Stage = Callable[[Head], Awaitable[StagedChange]]
#: ``Decide``: returns a change with what this server decides for all of them.
Decide = Callable[[Head], Awaitable[Head]]


async def _as_it_is(head: Head) -> Head:
    return head


@dataclass(frozen=True, slots=True)
class Proposal:
    """A change that has no place among the others yet.

    Attributes:
        head: the change; a label is added to one that makes a version and has none.
        content: its tensors.
        digest: their SHA-256, in hex.
        is_labelled: True if it makes a version.
        stage: stages it at this server.
        decide: completes the change, once it is clear which ones are before it.
    """

    head: Head
    content: Content | None
    digest: str | None
    is_labelled: bool
    stage: Stage
    decide: Decide = _as_it_is


@dataclass(frozen=True, slots=True)
class Outcome:
    """A change that was committed.

    Attributes:
        result: of this server.
        versions: the label or the number that each server is at, by address; None for one that
            is not yet.
    """

    result: Any
    versions: Mapping[str, str | None]


class FanOut:
    """Stages changes everywhere, and then commits them everywhere; one at a time."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._turn = asyncio.Lock()

    @property
    def _transport(self) -> Transport:
        return self._fleet.transport

    async def carry_out(self, proposal: Proposal) -> Outcome:
        """Carry out a change.

        Raises:
            PeerSilentError: a server does not answer; nothing has changed anywhere.
            PeerRefusedError, VersionMismatchError: a server refused; likewise.
            ConflictError: another change is before this one and does not end, or the fleet is
                split; likewise.
            ParallmError: this server refused; likewise.
        """
        async with self._turn:
            committing = await self._decide(proposal)
            if proposal.head["kind"] not in DECIDED_FIRST:
                return await committing
        # A later change may be what ends it, as a resume ends a pause that waits for requests.
        return await committing

    async def _decide(self, proposal: Proposal) -> Awaitable[Outcome]:
        """Return the commit of a change, once it can no longer be refused."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + RETRY_S
        while True:
            await self._fleet.look()
            await self._fleet.catch_up()
            try:
                return await self._attempt(proposal)
            except StaleChangeError as problem:
                if loop.time() >= until_s:
                    raise ConflictError(f"The fleet is changing: {problem}") from problem
            await asyncio.sleep(PAUSE_S)

    async def _attempt(self, proposal: Proposal) -> Awaitable[Outcome]:
        """Stage a change everywhere, and commit it here, which decides."""
        fleet = self._fleet
        peers = fleet.peers()
        for peer in peers:
            state = fleet.states.get(peer)
            if state is not None and state.digest != self._digest:
                why = "" if state.why is None else f" It says: {state.why}"
                raise StaleChangeError(f"{peer} is not at the state of {fleet.me}.{why}")
        entry = self._entry(proposal, await proposal.decide(proposal.head))
        fleet.holding = entry.digest
        try:
            await self._stage_all(proposal, entry, peers)
        except BaseException:
            fleet.holding = None
            raise
        here = asyncio.ensure_future(fleet.member.commit(entry.digest))
        if entry.kind not in DECIDED_FIRST:
            try:
                await here
            except BaseException:
                fleet.holding = None
                await self._drop_all(entry, peers)
                raise
        return asyncio.ensure_future(self._commit_all(entry, peers, here))

    @property
    def _digest(self) -> str:
        return self._fleet.member.state.digest

    def _entry(self, proposal: Proposal, head: Head) -> Entry:
        """Return the change with a number, and a label, that no other one ever had."""
        fleet, me = self._fleet, str(self._fleet.me)
        number = fleet.seen + 1
        if proposal.is_labelled and head.get("version") is None:
            label = str(number)
            if fleet.excused:
                # Servers that are not reachable may give this number to another change.
                text = f"{self._digest} {proposal.digest} {me}"
                label = f"{number}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
            head = {**head, "version": label}
        return Entry(number, self._digest, head, proposal.digest, me)

    async def _stage_all(self, proposal: Proposal, entry: Entry, peers: Sequence[Peer]) -> None:
        """Stage a change everywhere, or nowhere."""
        try:
            # The change that is first at the lowest address is first everywhere, so that no two
            # wait for each other.
            await self._reserve(entry, peers[0])
            await _all(self._stage(proposal, entry, peer) for peer in peers)
        except BaseException as problem:
            await self._drop_all(entry, peers)
            if isinstance(problem, PeerRefusedError):
                raise await self._refusal(proposal, entry.head, problem) from problem
            raise

    async def _reserve(self, entry: Entry, peer: Peer) -> None:
        if peer == self._fleet.me:
            await self._fleet.member.reserve(entry)
        else:
            await _bounded(peer, self._transport.reserve(peer, entry), None)

    async def _stage(self, proposal: Proposal, entry: Entry, peer: Peer) -> None:
        if peer != self._fleet.me:
            stage = self._transport.stage(peer, entry, proposal.content)
            await _bounded(peer, stage, proposal.content)
            return
        member = self._fleet.member
        await member.stage(entry, proposal.content, lambda: proposal.stage(entry.head))

    async def _refusal(
        self, proposal: Proposal, head: Head, problem: PeerRefusedError
    ) -> ParallmError:
        """Return what to raise for a peer's refusal: this server's own, if it refuses likewise."""
        if problem.code == STALE:
            return StaleChangeError(str(problem))
        if problem.status == PRECONDITION_FAILED:
            return VersionMismatchError(str(problem), param="expected_version")
        try:
            staged = await proposal.stage(head)
        except ParallmError as own:
            return own
        await staged.drop()
        return problem

    async def _drop_all(self, entry: Entry, peers: Sequence[Peer]) -> None:
        async def drop(peer: Peer) -> None:
            # One that cannot be reached drops it by itself in time.
            with contextlib.suppress(ParallmError):
                if peer == self._fleet.me:
                    await self._fleet.member.drop(entry.digest)
                else:
                    await self._transport.drop(peer, entry.digest)

        await asyncio.gather(*(drop(peer) for peer in peers))

    async def _commit_all(
        self, entry: Entry, peers: Sequence[Peer], here: asyncio.Future[Any]
    ) -> Outcome:
        """Commit a change at the others; one that does not answer catches up by itself."""
        label = entry.label or str(entry.number)
        versions: dict[str, str | None] = {str(peer): label for peer in peers}

        async def commit_at(peer: Peer) -> None:
            work = self._transport.commit(peer, entry.digest)
            # One that waits for requests may take as long as they do.
            await (work if entry.kind in DECIDED_FIRST else _bounded(peer, work, None))

        async def commit(peer: Peer) -> None:
            try:
                await commit_at(peer)
            except ParallmError as problem:
                logger.warning("%s has staged a change and not committed it: %s", peer, problem)
                versions[str(peer)] = None

        await asyncio.gather(*(commit(peer) for peer in peers if peer != self._fleet.me))
        if self._fleet.holding == entry.digest:
            self._fleet.holding = None
        return Outcome(await here, versions)


async def _bounded(peer: Peer, work: Awaitable[None], content: Content | None) -> None:
    """Wait for a step of a peer; raise PeerSilentError if it does not end, though it answers."""
    limit_s = STEP_S + len(content or b"") / BYTES_PER_S
    try:
        async with asyncio.timeout(limit_s):
            await work
    except TimeoutError:
        raise PeerSilentError(
            f"{peer} answers, and has not done its part within {limit_s:.0f} s."
        ) from None


async def _all(work: Iterable[Awaitable[None]]) -> None:
    """Wait for all; raise the first problem once all have ended."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
