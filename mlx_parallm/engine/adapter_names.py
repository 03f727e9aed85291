"""How requests find adapters by their names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mlx_parallm.engine.policies import AdapterInfo


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter that requests may name.

    Attributes:
        name: its own, without its model's.
        base: the first name of its model.
        source: the folder that it came from, or is to come from; None for an upload.
        info: None while it is not loaded: a request that names it loads it.
    """

    name: str
    base: str
    source: str | None
    info: AdapterInfo | None = None


class AdapterNames(Protocol):
    """The adapters of all models."""

    def named(self, name: str) -> NamedAdapter | None:
        """Return the adapter of this name, loaded or to be loaded."""
        ...

    async def ensure_loaded(self, name: str, base: str) -> None:
        """Load an adapter that was found by its name, unless it is there.

        Raises:
            ModelNotFoundError: there is none.
            InvalidRequestError: it cannot be used.
        """
        ...

    async def refresh(self) -> None:
        """Ask the engine thread which adapters are loaded."""
        ...
