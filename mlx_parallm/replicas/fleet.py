"""A server's view of its fleet: who is reachable, who had which changes, and catching up."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence

from mlx_parallm.replicas.entries import GENESIS, MIXED, Entry
from mlx_parallm.replicas.host import Content
from mlx_parallm.replicas.member import Member, MemberState, hashed
from mlx_parallm.replicas.past import Past
from mlx_parallm.replicas.peers import Peer
from mlx_parallm.replicas.standing import Relation, Standing, View, largest, standing
from mlx_parallm.replicas.transport import PeerState, StateQuery, Transport
from mlx_parallm.types.errors import (
    ConflictError,
    ParallmError,
    PeerRefusedError,
    PeerSilentError,
)

logger = logging.getLogger(__name__)

# POLL_S: seconds between two looks at the peers.
POLL_S = 1.0
# MAX_LOOKS: questions in a row to peers while this server's state changes.
MAX_LOOKS = 5
# LOG_S: seconds between two log lines about the same peer.
LOG_S = 60.0
# ALIVE_S: a peer that has not answered for this time counts as silent in what may take long.
ALIVE_S = 10.0
UNKNOWN = (
    "This server does not know yet which of its peers it is: none lists it, or none has answered. "
    "Name its own address with --peer-url."
)
LOST = "This server stopped on its way to the state of a peer, and no peer is reachable now."
GONE = "is no longer listed: its name has lost this address, and it may be changing apart."
FORGOTTEN = "The engines of this server were started anew and have not got the fleet's changes yet."
NOT_LOOKED = "This server has not asked its peers yet."

# _LATE: relations of peers that may be excused.
_LATE = frozenset({Relation.BEHIND, Relation.UNKNOWN})
#: ``Listed``: returns all listed peers, sorted; raises PeerSilentError if a name is not known.
Listed = Callable[[], Awaitable[Sequence[Peer]]]


class Fleet:
    """Looks at the peers, and brings this server to the state of those that are ahead.

    Attributes:
        member: this server.
        transport: reaches the others.
        me: this server's own address; None until it is known.
        instance: a random id of this process.
        states: the reachable peers, by address, without this server.
        problems: the peers that are not reachable, with the reason.
        excused: peers that are not reachable, or cannot catch up, without which an operator lets
            the fleet change.
        holding: the digest of the change that this server coordinates; None if there is none.
        is_draining: True if this server should get no requests any more.
    """

    def __init__(
        self, member: Member, transport: Transport, listed: Listed, *, me: Peer | None = None
    ) -> None:
        self.member = member
        self.transport = transport
        self.me = me
        self.instance = secrets.token_hex(8)
        self.states: Mapping[Peer, PeerState] = {}
        self.problems: Mapping[Peer, ParallmError] = {}
        self.excused: set[Peer] = set()
        self.holding: str | None = None
        self.is_draining = False
        self._listed = listed
        self._standing = Standing(NOT_LOOKED)
        self._asked = self.member.state.digest
        # All that were ever listed, but for this server; and why some cannot be listed now.
        self._known: set[Peer] = set()
        self._unlisted: ParallmError | None = None
        # Until a peer has answered since the engines were started, perhaps anew.
        self._is_fresh = True
        self._has_lost = False
        # The largest number that peers have heard of, some of which may have lost it since.
        self._heard = 0
        self._failure: ParallmError | None = None
        self._logged: dict[str, float] = {}
        self._looks = asyncio.Lock()
        self._answered_s: dict[Peer, float] = {}

    @property
    def why_not_ready(self) -> str | None:
        """Return why this server should get no requests; None if it should get some."""
        if self.is_draining:
            return "This server is being drained."
        if self._failure is not None and self._standing.target is not None:
            return f"{self._standing.why} The last try failed: {self._failure}"
        return self._standing.why

    @property
    def seen(self) -> int:
        """Return the largest number that was heard of, in changes and in labels, here or there."""
        return max(self._heard, self.member.state.seen, self.member.host.largest_label())

    def own_state(self, query: StateQuery) -> PeerState:
        """Return the answer to a peer; the change that it coordinates does not expire."""
        if query.holding is not None:
            self.member.renew(query.holding)
        state, staged = self.member.state, self.member.staged
        return PeerState(
            instance=self.instance,
            number=state.number,
            digest=state.digest,
            seen=self.seen,
            staged=None if staged is None else staged.digest,
            knows=state.knows(query.digest),
            why=self.why_not_ready,
            members={str(peer): each.instance for peer, each in self.states.items()},
            versions=self.member.host.versions(),
            models=self.member.host.models(),
        )

    async def watch(self) -> None:
        """Look at the peers and catch up with them, for ever."""
        while True:
            try:
                await self.look()
                await self.catch_up()
            except Exception as problem:  # noqa: BLE001 - the next look may succeed
                self._log("look", "the peers cannot be looked at; trying again: %r", problem)
            await asyncio.sleep(POLL_S)

    async def look(self) -> None:
        """Ask all peers for their states, and again if this server's has changed meanwhile."""
        async with self._looks:
            for _ in range(MAX_LOOKS):
                await self._ask_all()
                if self._asked == self.member.state.digest:
                    break
        self._standing = self._stand()

    async def _ask_all(self) -> None:
        if self.holding is not None:
            self.member.renew(self.holding)
        listed = await self._resolved()
        query = StateQuery(self.member.state.digest, self.holding)
        peers = [peer for peer in listed if peer != self.me]
        questions = (self.transport.state(peer, query) for peer in peers)
        answers = await asyncio.gather(*questions, return_exceptions=True)
        self._note(peers, answers)
        self._asked = query.digest

    async def _resolved(self) -> Sequence[Peer]:
        try:
            listed = await self._listed()
        except PeerSilentError as problem:
            self._unlisted = problem
            return ()
        self._unlisted = None
        return listed

    def _note(self, peers: Sequence[Peer], answers: Sequence[PeerState | BaseException]) -> None:
        """Note what the peers answered."""
        states: dict[Peer, PeerState] = {}
        problems: dict[Peer, ParallmError] = {}
        instances = {self.instance}
        for peer, answer in zip(peers, answers, strict=True):
            if isinstance(answer, ParallmError):
                problems[peer] = answer
                self._log(str(peer), "%s is not reachable: %s", peer, answer)
            elif isinstance(answer, BaseException):
                raise answer
            elif answer.instance == self.instance:
                self.me = self.me or peer
                self._known.discard(peer)
            elif answer.instance not in instances:
                # One server may be listed under two addresses.
                instances.add(answer.instance)
                states[peer] = answer
        gone = self._known - set(peers) - {self.me}
        problems |= {peer: PeerSilentError(f"{peer} {GONE}") for peer in gone}
        self._known |= states.keys() | problems.keys()
        self._is_fresh &= not states
        self._heard = max((self._heard, *(each.seen for each in states.values())))
        self.states, self.problems = states, problems
        self._answered_s |= dict.fromkeys(states, asyncio.get_running_loop().time())
        self.excused -= {peer for peer, view in self.views().items() if view.relation not in _LATE}
        self._find_own_address()

    def is_alive(self, peer: Peer) -> bool:
        """True if a peer has answered lately."""
        now_s = asyncio.get_running_loop().time()
        return now_s - self._answered_s.get(peer, now_s) < ALIVE_S

    def _find_own_address(self) -> None:
        """Take this server's address from those that list it."""
        if self.me is None:
            names = [
                name
                for state in self.states.values()
                for name, instance in state.members.items()
                if instance == self.instance
            ]
            self.me = Peer(min(names)) if names else None

    def _stand(self) -> Standing:
        if self._asked != self.member.state.digest:
            return self._standing
        me, views = self.me or Peer(""), self.views()
        if self.member.state.is_mixed and not any(
            view.relation is Relation.AHEAD for view in views.values()
        ):
            return Standing(LOST)
        if (why := self._why_alone()) is not None:
            return Standing(why)
        return standing(me, self.member.state.number, views)

    def _why_alone(self) -> str | None:
        """Return why a server that has heard of no change waits for a peer; None: it does not."""
        waits = self._is_fresh and self.member.state.digest == GENESIS
        problems = [each for peer, each in self.problems.items() if peer not in self.excused]
        refusals = [each for each in problems if isinstance(each, PeerRefusedError)]
        if waits and refusals:
            return f"No peer has answered yet, and one refuses: {refusals[0]}"
        return FORGOTTEN if waits and problems and self._has_lost else None

    def forget(self) -> None:
        """Note that the engines were started anew: no change is left there."""
        self._has_lost |= self.member.state.digest != GENESIS
        self.member.forget()
        self._is_fresh = True
        self._standing = Standing(FORGOTTEN)

    def views(self) -> Mapping[Peer, View]:
        """Return the states of the reachable peers, as they relate to this server's."""
        return {
            peer: View(state.digest, state.number, self._relation(state))
            for peer, state in self.states.items()
        }

    def _relation(self, state: PeerState) -> Relation:
        mine = self.member.state
        if state.digest == mine.digest:
            return Relation.SAME
        if self._asked != mine.digest:
            # Its answer was about an earlier state of this server.
            return Relation.UNKNOWN
        if state.digest == MIXED:
            return Relation.BEHIND
        if mine.is_mixed:
            return Relation.AHEAD
        if mine.knows(state.digest):
            return Relation.BEHIND
        return Relation.AHEAD if state.knows else Relation.FORKED

    async def catch_up(self) -> None:
        """Commit the staged change if a peer has, or become like the peers that are ahead."""
        staged = self.member.staged
        is_decided = staged is not None and any(
            state.digest == staged.digest for state in self.states.values()
        )
        if staged is not None and is_decided and not self.member.is_committing:
            await self._tried(self._commit_staged(staged))
            await self.look()
        target = self._standing.target
        if target is not None and self.member.staged is None:
            await self._tried(self.become(target))

    async def _commit_staged(self, staged: Entry) -> None:
        await self.member.commit_staged(staged)
        await self.member.host.settle()

    async def become(self, peer: Peer, *, over: str | None = None) -> None:
        """Bring this server to the state of a peer that has all of its changes.

        ``over``: the state of this server that an operator gives up for that of the peer.

        Raises:
            ParallmError: a step fails.
        """
        past = await self.transport.past(peer)
        async with self.member.moving() as state:
            if not _is_ahead(past, state, over):
                return
            state.seen = max(state.seen, past.number, past.seen)
            for step in state.leave(past.journal):
                content = None if step.entry is None else await self._content(peer, step.entry)
                await self.member.carry_out(step.head, content)
                if step.entry is not None and content is not None:
                    state.contents[step.entry.rest_content or ""] = content
            state.move(past)
        await self.member.host.settle()
        logger.info("caught up with %s: change %d", peer, past.number)
        await self.look()

    async def _content(self, peer: Peer, entry: Entry) -> Content | None:
        """Return the tensors of a change, from this server or from a peer."""
        if entry.rest_content is None:
            return None
        known = self.member.state.contents.get(entry.rest_content)
        if known is not None:
            return known
        content = await self.transport.content(peer, entry.rest_content)
        if await hashed(content) != entry.rest_content:
            raise PeerSilentError(f"{peer} sends other tensors than it names.")
        return content

    async def _tried(self, work: Awaitable[None]) -> None:
        """Note why work failed, if it does."""
        try:
            await work
        except ParallmError as problem:
            self._failure = problem
            self._log("catch up", "this server cannot catch up yet: %s", problem)
        else:
            self._failure = None

    def peers(self) -> Sequence[Peer]:
        """Return the servers that must take a change, this one included, lowest address first.

        Raises:
            PeerSilentError: one is not reachable, and is not excused; or this server's address is
                not known.
            PeerRefusedError: one refused, as of another release.
            ConflictError: the fleet is split.
        """
        for peer, problem in sorted(self.problems.items()):
            if peer not in self.excused:
                raise problem if isinstance(problem, PeerRefusedError) else _without(problem)
        if self._unlisted is not None:
            raise self._unlisted
        if self.me is None:
            raise PeerSilentError(UNKNOWN)
        views = self.views()
        if any(view.relation is Relation.FORKED for view in views.values()):
            raise ConflictError(
                "The servers of this fleet had different changes: `mlx_parallm fleet apply` makes "
                "them alike."
            )
        return sorted((self.me, *(peer for peer in views if peer not in self.excused)))

    async def apply(self, *, force: bool) -> None:
        """Do what an operator decides about a fleet that is split; this server's part.

        A server of a smaller part becomes like the larger one. With ``force`` the servers that are
        not reachable now, or cannot catch up, no longer keep the others from changing, until they
        are back.

        Raises:
            ParallmError: this server cannot become like the others.
        """
        await self.look()
        await self.catch_up()
        over = self.member.state.digest
        views = self.views()
        if force:
            late = {peer for peer, view in views.items() if view.relation is Relation.BEHIND}
            self.excused |= self.problems.keys() | late
            self._standing = self._stand()
        forked = {peer: view for peer, view in views.items() if view.relation is Relation.FORKED}
        if forked and not self._standing.is_ready:
            await self.become(largest(forked)[0], over=over)

    def _log(self, key: str, message: str, *args: object) -> None:
        """Log a line, unless there was one about this key within the last minute."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._logged.get(key, -LOG_S) >= LOG_S:
            self._logged[key] = now_s
            logger.warning(message, *args)


def _is_ahead(past: Past, state: MemberState, over: str | None) -> bool:
    """True if a server may still become like a peer; either may have changed meanwhile."""
    if past.digest in (MIXED, state.digest):
        return False
    if state.is_mixed:
        # Any state is better than none, an earlier one too.
        return True
    return not state.knows(past.digest) and (past.knows(state.digest) or state.digest == over)


def _without(problem: ParallmError) -> PeerSilentError:
    return PeerSilentError(
        f"{problem} Nothing was changed; `mlx_parallm fleet apply --force` lets the others change "
        "without it."
    )
