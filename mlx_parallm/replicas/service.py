"""A server's part in its fleet, made of its settings and its engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client.core import GaugeMetricFamily

from mlx_parallm.config import ModelConfig
from mlx_parallm.engine.control import EngineControl
from mlx_parallm.engine.directory import ModelDirectory
from mlx_parallm.replicas.codec import Folders
from mlx_parallm.replicas.engine_host import EngineHost, FleetChanges
from mlx_parallm.replicas.fan_out import FanOut
from mlx_parallm.replicas.fleet import Fleet
from mlx_parallm.replicas.http_transport import PREFIX, HttpTransport
from mlx_parallm.replicas.member import Member
from mlx_parallm.replicas.names import LastNames
from mlx_parallm.replicas.peers import Peer, PeerClient, PeerList
from mlx_parallm.replicas.room import AdapterRoom
from mlx_parallm.replicas.served import ServedModels, local_folder
from mlx_parallm.types.errors import ParallmError

# APPLY_S: time that a peer gets to become like the others because an operator said so.
APPLY_S = 600.0


class Replicas:
    """Lets the operator's changes of an engine reach all servers of a fleet.

    Attributes:
        member: this server.
        fleet: its view of the others.
        max_bytes: most bytes of the tensors of a change.
    """

    def __init__(
        self,
        control: EngineControl,
        directory: ModelDirectory,
        peers: PeerList,
        *,
        me: Peer | None,
        key: str | None,
        max_bytes: int,
        models: Sequence[ModelConfig],
    ) -> None:
        """Take over the changes of ``control``.

        Args:
            control: the commands of the operator.
            directory: the models that the operator may load.
            peers: the servers of the fleet.
            me: this one's address; None finds it out.
            key: for the peers.
            max_bytes: see the class.
            models: that this server starts with.
        """
        self.max_bytes = max_bytes
        self._peers = peers
        self._names = LastNames()
        self._client = PeerClient(key, ())
        self._served = ServedModels(models)
        folders = Folders(
            control.checkpoint_folder,
            directory.own_folder,
            lambda load: local_folder(directory.source_of(load)),
        )
        self.member = Member(EngineHost(control, folders, self._served))
        transport = HttpTransport(self._client, max_bytes, self._is_alive, self._served)
        self.fleet = Fleet(self.member, transport, self._listed, me=me)
        control.on_forgotten = self.fleet.forget
        control.changes = FleetChanges(
            control, folders, FanOut(self.fleet), AdapterRoom(control, self.member)
        )
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look at the peers."""
        self._watching = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        await self._served.look()
        await asyncio.gather(self._served.watch(), self.fleet.watch())

    async def stop(self) -> None:
        """Look no more, and close all connections."""
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        await self._client.close()

    async def apply(self, *, force: bool, everywhere: bool) -> None:
        """See ``Fleet.apply``; ``everywhere``: at this server, and then at all reachable ones.

        Raises:
            ParallmError: a server cannot become like the others.
        """
        await self.fleet.apply(force=force)
        if everywhere:
            path = f"{PREFIX}/apply?everywhere=false&force={str(force).lower()}"
            answers = [
                self._client.ask(peer, "POST", path, within_s=APPLY_S) for peer in self.fleet.states
            ]
            results = await asyncio.gather(*answers, return_exceptions=True)
            await self.fleet.look()
            for result in results:
                if isinstance(result, BaseException):
                    raise result

    def family(self) -> GaugeMetricFamily:
        """Return a metric of how many servers of the fleet get requests, by the latest look."""
        servers = GaugeMetricFamily(
            "mlx_parallm:fleet_servers",
            "Servers of the fleet, this one included.",
            labels=["state"],
        )
        fleet = self.fleet
        reasons = [fleet.why_not_ready, *(state.why for state in fleet.states.values())]
        num_ready, num_all = reasons.count(None), len(reasons) + len(fleet.problems)
        for state, count in (("ready", num_ready), ("not_ready", num_all - num_ready)):
            servers.add_metric([state], count)
        return servers

    def status(self) -> Mapping[str, Any]:
        """Return the state of each server of the fleet."""
        fleet, own = self.fleet, self.member.state
        here = {
            "url": None if fleet.me is None else str(fleet.me),
            "number": own.number,
            "ready": fleet.why_not_ready is None,
            "reason": fleet.why_not_ready,
            **self.member.host.versions(),
        }
        rows = [here | {"here": True, "staged_bytes": self.member.num_staged_bytes}]
        rows += [
            {
                "url": str(peer),
                "number": state.number,
                "ready": state.why is None,
                "reason": state.why,
                **state.versions,
                "here": False,
            }
            for peer, state in fleet.states.items()
        ]
        rows += [_lost(peer, problem, fleet.excused) for peer, problem in fleet.problems.items()]
        return {"object": "fleet", "data": sorted(rows, key=lambda row: row["url"] or "")}

    async def _listed(self) -> Sequence[Peer]:
        """Return the peers as names are resolved now; only these are asked from now on.

        Raises:
            PeerSilentError: a name was never known.
        """
        self._client.listed = await self._peers.resolved(self._names)
        return self._client.listed

    def _is_alive(self, peer: Peer) -> bool:
        return self.fleet.is_alive(peer)


def _lost(peer: Peer, problem: ParallmError, excused: set[Peer]) -> dict[str, Any]:
    reason = f"{problem} The others change without it." if peer in excused else str(problem)
    return {"url": str(peer), "number": None, "ready": False, "reason": reason, "here": False}
