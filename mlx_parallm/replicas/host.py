"""The server that a member of a fleet changes, as the member sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from mlx_parallm.replicas.entries import Head

#: ``Content``: the tensors of a change, as a safetensors file; it does not change.
Content = bytes | bytearray


class StagedChange(Protocol):
    """A change that is prepared and not served; see ``engine.changes.Staged``."""

    async def commit(self) -> Any:
        """Let requests see it; return its result."""
        ...

    async def drop(self) -> None:
        """Forget it."""
        ...


class Host(Protocol):
    """Carries out changes at one server."""

    async def stage(self, head: Head, content: Content | None) -> StagedChange:
        """Return a change once it is staged; raise ParallmError if it cannot be."""
        ...

    async def settle(self) -> None:
        """Return once all processes of the server know its models and adapters as they are."""
        ...

    def versions(self) -> Mapping[str, Mapping[str, str]]:
        """Return the labels of weights ("models") and of adapters ("adapters"), by name."""
        ...

    def models(self) -> Mapping[str, str]:
        """Return marks of the models that the server started with; see ``ServedModels``."""
        ...

    def largest_label(self) -> int:
        """Return the largest number that is a label here; 0 if none is one."""
        ...
