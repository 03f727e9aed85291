"""Room for adapters that all servers of a fleet have: all evict the same one."""

from __future__ import annotations

from typing import Any

from mlx_parallm.engine.adapter_commands import FindRoom, first_evictable
from mlx_parallm.engine.changes import LoadAdapter, ServerChange
from mlx_parallm.engine.control import EngineControl
from mlx_parallm.replicas.entries import LOAD_ADAPTER, Head
from mlx_parallm.replicas.member import Member
from mlx_parallm.types.errors import InvalidRequestError, OverloadedError


class AdapterRoom:
    """Decides which adapter is evicted for another one, at all servers.

    Adapters of the journal are evicted everywhere, or nowhere. Those that a request loads again are
    evicted by each server as it needs. All others, which servers start with, never are.
    """

    def __init__(self, control: EngineControl, member: Member) -> None:
        self._control = control
        self._member = member
        control.spared = self.spared

    def spared(self, model: str) -> frozenset[str]:
        """Return the adapters of a model that this server does not evict by itself."""
        journal = self._journal(model)
        return frozenset(name for name in self._names(model) if self._stays(name, journal))

    async def decide(self, change: ServerChange[Any], head: Head) -> Head:
        """Return the head of a change with what all servers evict for it, if it is an adapter.

        Raises:
            InvalidRequestError, OverloadedError: there is no room; see ``Policies.load``.
        """
        if not isinstance(change, LoadAdapter):
            return head
        door, name, model = self._control.door, change.upload.name, change.model
        async with door.hold(model):
            spared = self.spared(model)
            try:
                await door.call(FindRoom(name, model, spared))
            except (InvalidRequestError, OverloadedError):
                never = spared - self._journal(model)
                evictable = await door.call(FindRoom(name, model, never))
                return {**head, "evicted": first_evictable(evictable)}
        return head

    def _stays(self, name: str, journal: frozenset[str]) -> bool:
        return name in journal or not self._control.names.may_return(name)

    def _journal(self, model: str) -> frozenset[str]:
        heads = (entry.head for entry in self._member.state.journal if entry.kind == LOAD_ADAPTER)
        return frozenset(head["name"] for head in heads if head["model"] == model)

    def _names(self, model: str) -> list[str]:
        return [info.name for info in self._control.adapters() if info.model == model]
