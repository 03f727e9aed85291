"""A fleet of replicas without HTTP and engines: hosts that remember, and a network with faults."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mlx_parallm.replicas.entries import BASE_WEIGHTS, DECIDED_FIRST, Entry, Head
from mlx_parallm.replicas.fan_out import FanOut, Outcome, Proposal
from mlx_parallm.replicas.fleet import Fleet
from mlx_parallm.replicas.host import Content
from mlx_parallm.replicas.member import Member, content_digest
from mlx_parallm.replicas.past import Past
from mlx_parallm.replicas.peers import Peer
from mlx_parallm.replicas.transport import PeerState, StateQuery
from mlx_parallm.types.errors import (
    InvalidRequestError,
    ParallmError,
    PeerRefusedError,
    PeerSilentError,
)

T = TypeVar("T")
TIMEOUT_S = 2.0


@dataclass
class Labels:
    """The content that was ever served under each label; a label has one content."""

    contents: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])

    def note(self, name: str, label: str, content: str) -> None:
        before = self.contents.setdefault((name, label), content)
        assert before == content, f"{name} {label} was {before} and is {content}"


class FakeStaged:
    """A change of a ``FakeHost``."""

    def __init__(self, host: FakeHost, head: Head, content: Content | None) -> None:
        self._host, self._head, self._content = host, head, content
        host.num_staged += 1

    async def commit(self) -> Any:
        self._host.num_staged -= 1
        if self._head["kind"] not in DECIDED_FIRST:
            await asyncio.sleep(self._host.delay_s)
        elif self._host.requests_end is not None:
            await self._host.requests_end.wait()
        return self._host.carry_out(self._head, content_digest(self._content or b""))

    async def drop(self) -> None:
        self._host.num_staged -= 1


class FakeHost:
    """Remembers what its changes made; ``refuses`` and ``delay_s`` are of what is staged."""

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self.num_staged = 0
        self.refuses = False
        self.delay_s = 0.0
        self.requests_end: asyncio.Event | None = None
        self.forget()

    def forget(self) -> None:
        """Be as the engines are once they were started anew."""
        self.adapters: dict[str, tuple[str, str]] = {}
        self.weights: dict[str, str] = {}
        self.label = "0"
        self.is_paused = self.is_asleep = False
        self.loaded: set[str] = set()

    async def stage(self, head: Head, content: Content | None) -> FakeStaged:
        await asyncio.sleep(self.delay_s)
        if self.refuses:
            raise InvalidRequestError("This does not fit.")
        return FakeStaged(self, head, content)

    def carry_out(self, head: Head, content: str) -> str | None:
        match head["kind"]:
            case "load_adapter":
                self.labels.note(head["name"], head["version"], content)
                self.adapters[head["name"]] = head["version"], content
            case "unload_adapter":
                self.adapters.pop(head["name"], None)
            case "update_weights":
                if head["folder"] is None:
                    self.weights |= dict.fromkeys(head["names"], content)
                else:
                    self.weights = {"folder": head["folder"]}
                self._label(head["version"])
            case "label_weights":
                self._label(head["version"])
            case "pause" | "resume":
                self.is_paused = head["kind"] == "pause"
            case "sleep" | "wake":
                self.is_asleep = head["kind"] == "sleep"
            case "load_model":
                self.loaded.add(head["name"])
            case "unload_model":
                self.loaded.discard(head["name"])
            case kind:
                assert kind == BASE_WEIGHTS
                self.weights, self.label = {}, "0"
        return head.get("version")

    def _label(self, label: str) -> None:
        self.label = label
        self.labels.note("weights", label, str(sorted(self.weights.items())))

    async def settle(self) -> None:
        """Return at once: this server is one process."""

    def versions(self) -> Mapping[str, Mapping[str, str]]:
        return {"adapters": {name: label for name, (label, _) in self.adapters.items()}}

    def models(self) -> Mapping[str, str]:
        return {}

    def largest_label(self) -> int:
        labels = [self.label, *(label for label, _ in self.adapters.values())]
        return max((int(label) for label in labels if label.isdecimal()), default=0)

    @property
    def facts(self) -> Any:
        states = self.is_paused, self.is_asleep, self.loaded
        return self.adapters, self.weights, self.label, states


class Server:
    """One process of a server: its tasks end when it is killed."""

    def __init__(self, network: Network, peer: Peer) -> None:
        self.peer = peer
        self.host = FakeHost(network.labels)
        self.member = Member(self.host)
        self.fleet = Fleet(self.member, Wire(network, self), network.listed)
        self.fan_out = FanOut(self.fleet)
        self.is_dead = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self.run(self.fleet.watch())

    def run(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run work as this process's own."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # The task that waits for this one may have been killed.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    def kill(self) -> None:
        """End all tasks; what they would still do, such as dropping a change, reaches nobody."""
        self.is_dead = True
        for task in list(self._tasks):
            task.cancel()

    async def change(self, head: Head, content: Content | None = None) -> Outcome:
        """Carry out a change that reaches this server."""
        is_labelled = head["kind"] in ("load_adapter", "update_weights")

        digest = None if content is None else content_digest(content)

        async def stage(labelled: Head) -> FakeStaged:
            return await self.host.stage(labelled, content)

        return await self.fan_out.carry_out(Proposal(head, content, digest, is_labelled, stage))


class Network:
    """Servers by address, and who cannot reach whom."""

    def __init__(self, num_servers: int) -> None:
        self.labels = Labels()
        self.peers = [Peer(f"http://10.0.0.{number}:8000") for number in range(1, num_servers + 1)]
        self.cuts: set[frozenset[Peer]] = set()
        # Pairs of which the first one cannot reach the second, and servers with another key.
        self.one_way_cuts: set[tuple[Peer, Peer]] = set()
        self.strangers: set[Peer] = set()
        self.latency_s = 0.001
        self.servers: dict[Peer, Server] = {}
        for peer in self.peers:
            self.start(peer)

    async def listed(self) -> Sequence[Peer]:
        return self.peers

    def start(self, peer: Peer) -> None:
        self.servers[peer] = Server(self, peer)

    def kill(self, peer: Peer) -> None:
        self.servers.pop(peer).kill()
        if all(server.fleet.seen == 0 for server in self.servers.values()):
            # Nobody remembers anything: the fleet begins anew, as one server would.
            self.labels.contents.clear()

    def close(self) -> None:
        for peer in list(self.servers):
            self.kill(peer)

    def server(self, number: int) -> Server:
        return self.servers[self.peers[number]]

    def is_cut(self, source: Peer, target: Peer) -> bool:
        """True if a server cannot ask another one; an answer takes the way of its question."""
        return frozenset((source, target)) in self.cuts or (source, target) in self.one_way_cuts

    def cut(self, *sides: Sequence[int]) -> None:
        """Let servers of different sides not reach each other."""
        first, second = sides
        self.cuts = {frozenset((self.peers[a], self.peers[b])) for a in first for b in second}


class Wire:
    """The transport of one server over a network."""

    def __init__(self, network: Network, server: Server) -> None:
        self._network, self._server = network, server

    async def _asked(self, peer: Peer, ask: Callable[[Server], Coroutine[Any, Any, T]]) -> T:
        network = self._network
        if self._server.is_dead:
            raise PeerSilentError("This process was killed.")
        await asyncio.sleep(network.latency_s)
        there = network.servers.get(peer)
        if there is None:
            raise PeerSilentError(f"{peer} refuses connections.")
        if {peer, self._server.peer} & network.strangers:
            raise PeerRefusedError(f"{peer} refuses: wrong key.", status=401)
        if network.is_cut(self._server.peer, peer):
            await asyncio.sleep(TIMEOUT_S)
            raise PeerSilentError(f"{peer} does not answer.")
        work = there.run(ask(there))
        await asyncio.wait([work])
        if work.cancelled() or network.is_cut(self._server.peer, peer):
            raise PeerSilentError(f"{peer} was lost.")
        problem = work.exception()
        if isinstance(problem, ParallmError):
            code = getattr(problem, "code", None)
            raise PeerRefusedError(f"{peer}: {problem}", status=409, code=code)
        return work.result()

    async def state(self, peer: Peer, query: StateQuery) -> PeerState:
        async def ask(there: Server) -> PeerState:
            return there.fleet.own_state(query)

        return await self._asked(peer, ask)

    async def reserve(self, peer: Peer, entry: Entry) -> None:
        await self._asked(peer, lambda there: there.member.reserve(entry))

    async def stage(self, peer: Peer, entry: Entry, content: Content | None) -> None:
        await self._asked(peer, lambda there: there.member.stage(entry, content))

    async def commit(self, peer: Peer, digest: str) -> None:
        await self._asked(peer, lambda there: there.member.commit(digest))

    async def drop(self, peer: Peer, digest: str) -> None:
        await self._asked(peer, lambda there: there.member.drop(digest))

    async def past(self, peer: Peer) -> Past:
        async def ask(there: Server) -> Past:
            return there.member.state.past

        return await self._asked(peer, ask)

    async def content(self, peer: Peer, digest: str) -> Content:
        async def ask(there: Server) -> Content:
            return there.member.content(digest)

        return await self._asked(peer, ask)


async def settle(network: Network, for_s: float = 90.0) -> None:
    """Let virtual time pass until every staged change has ended and everybody has caught up."""
    del network
    await asyncio.sleep(for_s)


@contextlib.contextmanager
def ignoring() -> Any:
    """Ignore refusals."""
    with contextlib.suppress(ParallmError, asyncio.CancelledError):
        yield


def adapter(name: str = "a") -> Head:
    return {
        "kind": "load_adapter",
        "name": name,
        "model": "m",
        "version": None,
        "expected_version": None,
        "replaces": True,
    }


def from_folder(folder: str) -> Head:
    return {**update(), "folder": folder, "mark": folder, "names": ()}


def update(*names: str) -> Head:
    return {
        "kind": "update_weights",
        "model": "m",
        "version": None,
        "expected_version": None,
        "folder": None,
        "names": names or ("w",),
    }
