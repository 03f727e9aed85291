"""Interfaces of a model's adapters: where their tensors are, and which requests use them."""

from __future__ import annotations

from typing import Any, Protocol

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.engine.adapter_slots import AdapterSlots
from mlx_parallm.types.errors import InvalidRequestError

#: A head that an adapter brings. Only its model's kind knows what is in it.
AdapterHead = Any


class TensorStore(Protocol):
    """The tensors of a model's adapters, by their content ids."""

    def add(self, content: str, adapter: AdapterWeights) -> AdapterHead | None:
        """Keep an adapter that batches may name; return the head that it brings, if any.

        Raises:
            InvalidRequestError: it does not fit.
        """
        ...

    def stage(self, slot: int, content: str) -> bool:
        """Upload the next part of an adapter into a slot; True if there is more."""
        ...

    def remove(self, content: str) -> None:
        """Forget an adapter that no later batch names."""
        ...


class AdapterUsers(Protocol):
    """The requests of a model, some of which use adapters."""

    @property
    def adapters(self) -> AdapterSlots:
        """Return the slots of adapters."""
        ...

    def uses(self, content: str) -> bool:
        """True if a request here uses this adapter."""
        ...

    def num_running(self, content: str) -> int:
        """Return how many sequences run with this adapter."""
        ...

    def refresh_weights(self) -> None:
        """Use the new weights of all requests from the next step on."""
        ...


class NoAdapters:
    """Implements ``TensorStore`` and ``AdapterUsers`` for a model that takes no adapters."""

    def __init__(self) -> None:
        self.adapters = AdapterSlots(0)

    def add(self, content: str, adapter: AdapterWeights) -> AdapterHead | None:
        """Refuse."""
        del content, adapter
        raise InvalidRequestError("This model takes no adapters.", param="model")

    def stage(self, slot: int, content: str) -> bool:
        """Do nothing."""
        del slot, content
        return False

    def remove(self, content: str) -> None:
        """Do nothing."""

    def uses(self, content: str) -> bool:
        """Return False."""
        del content
        return False

    def num_running(self, content: str) -> int:
        """Return 0."""
        del content
        return 0

    def refresh_weights(self) -> None:
        """Do nothing."""
