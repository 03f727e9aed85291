"""The questions and answers of the servers of a fleet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlx_parallm.replicas.entries import Entry
from mlx_parallm.replicas.host import Content
from mlx_parallm.replicas.past import Past
from mlx_parallm.replicas.peers import Peer
from mlx_parallm.types.errors import PeerSilentError
from mlx_parallm.types.json_values import is_object


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerState:
    """The state of a server, for another one.

    Attributes:
        instance: a random id of its process.
        number: of its latest change.
        digest: of all its changes.
        seen: the largest number that it has heard of, in changes and in labels.
        staged: the digest of the change that it has staged; None if there is none.
        knows: True if the state of the one that asks is an earlier one of its own.
        why: the reason for which it should get no requests; None if it should get some.
        members: the instances that it reaches, by address.
        versions: labels of weights ("models") and adapters ("adapters"), by name.
        models: marks of those that it started with, by name; see ``ServedModels``.
    """

    instance: str
    number: int = 0
    digest: str = ""
    seen: int = 0
    staged: str | None = None
    knows: bool = False
    why: str | None = None
    members: Mapping[str, str] = field(default_factory=dict[str, str])
    versions: Mapping[str, Mapping[str, str]] = field(
        default_factory=dict[str, "Mapping[str, str]"]
    )
    models: Mapping[str, str] = field(default_factory=dict[str, str])

    @staticmethod
    def from_json(peer: Peer, value: Mapping[str, Any]) -> PeerState:
        """Return the state of a peer's answer; raise PeerSilentError if it is none."""
        kinds = {"instance": str, "number": int, "digest": str, "seen": int, "knows": bool}
        has_kinds = all(isinstance(value.get(name), kind) for name, kind in kinds.items())
        texts = all(isinstance(value.get(name), str | None) for name in ("staged", "why"))
        tables = all(_is_table(value.get(name)) for name in ("members", "models"))
        if not (has_kinds and texts and tables and _are_versions(value.get("versions"))):
            raise PeerSilentError(f"{peer} does not answer as a server of a fleet.")
        return PeerState(**{name: value[name] for name in PeerState.__dataclass_fields__})


def _is_table(value: Any) -> bool:
    """True if a JSON value has texts by name."""
    return is_object(value) and all(isinstance(text, str) for text in value.values())


def _are_versions(value: Any) -> bool:
    tables = ("models", "adapters")
    return is_object(value) and all(
        name in tables and _is_table(table) for name, table in value.items()
    )


@dataclass(frozen=True, slots=True)
class StateQuery:
    """A question for the state of a peer.

    Attributes:
        digest: of the changes of the server that asks.
        holding: the digest of the change that it coordinates, which is not to expire; None: none.
    """

    digest: str
    holding: str | None = None


class Transport(Protocol):
    """Carries questions and changes to peers.

    All methods raise PeerRefusedError or PeerSilentError.
    """

    async def state(self, peer: Peer, query: StateQuery) -> PeerState:
        """Return the state of a peer."""
        ...

    async def reserve(self, peer: Peer, entry: Entry) -> None:
        """Have a peer stage no other change before this one."""
        ...

    async def stage(self, peer: Peer, entry: Entry, content: Content | None) -> None:
        """Have a peer stage a change."""
        ...

    async def commit(self, peer: Peer, digest: str) -> None:
        """Have a peer commit the change that it has staged."""
        ...

    async def drop(self, peer: Peer, digest: str) -> None:
        """Have a peer drop the change that it has staged."""
        ...

    async def past(self, peer: Peer) -> Past:
        """Return a peer's changes."""
        ...

    async def content(self, peer: Peer, digest: str) -> Content:
        """Return the tensors of a change of a peer's journal."""
        ...
