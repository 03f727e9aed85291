"""The adapters of one model: kept by content, and put into slots as batches name them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.types.pooling import OwnHead

# Nine layers of seven, put between two steps: some milliseconds, so that no stream stalls.
MODULES_AT_A_TIME = 63
#: What refusals name: the tensors of an upload.
PARAM = "adapter"


class SlotTarget(Protocol):
    """A model whose slots have adapters."""

    @property
    def num_bytes(self) -> int:
        """Of all that is in slots."""
        ...

    def check(self, adapter: AdapterWeights, *, param: str) -> OwnHead | None:
        """The head that an adapter brings; raise InvalidRequestError if it does not fit."""
        ...

    def begin(self, slot: int, adapter: AdapterWeights, *, param: str) -> None:
        """Let a slot become this adapter; raise InvalidRequestError if it does not fit."""
        ...

    def put_some(self, slot: int, count: int) -> bool:
        """Put the next ``count`` modules of a slot that was begun; whether there are more."""
        ...

    def drop(self, slot: int) -> None:
        """Let a slot be no adapter."""
        ...

    def renew(self) -> None:
        """Heed weights of the model that were replaced."""
        ...


class AdapterStore:
    """Implements ``engine.policies.AdapterStore``. Lives on the engine thread."""

    def __init__(self, layers: SlotTarget) -> None:
        self._layers = layers
        self._adapters: dict[str, AdapterWeights] = {}
        self._heads: dict[str, OwnHead | None] = {}
        self._resident: dict[int, str] = {}
        # Slots of which a part has been put.
        self._begun: dict[int, str] = {}

    @property
    def num_bytes(self) -> int:
        """Of all slots on the device."""
        return self._layers.num_bytes

    def add(self, adapter: AdapterWeights) -> OwnHead | None:
        """Keep an adapter for later batches; the head that it brings.

        Raises:
            InvalidRequestError: the model has no such modules.
        """
        if adapter.digest not in self._adapters:
            self._heads[adapter.digest] = self._layers.check(adapter, param=PARAM)
            self._adapters[adapter.digest] = adapter
        return self._heads[adapter.digest]

    def move(self, layers: SlotTarget) -> None:
        """Keep the adapters for another model, which was loaded in place of the one before."""
        self.release()
        self._layers = layers

    def remove(self, content: str) -> None:
        """Forget an adapter that no later batch names."""
        self._adapters.pop(content, None)
        self._heads.pop(content, None)

    def place(self, slots: Mapping[int, str]) -> None:
        """Have these adapters in these slots."""
        for slot, content in slots.items():
            while self.stage(slot, content):
                pass

    def stage(self, slot: int, content: str) -> bool:
        """Put the next part of an adapter into a slot; whether there is more."""
        if self._resident.get(slot) == content:
            return False
        if self._begun.get(slot) != content:
            # Whatever fails from here on leaves a slot that is put anew.
            self._resident.pop(slot, None)
            self._begun.pop(slot, None)
            self._layers.begin(slot, self._adapters[content], param=PARAM)
            self._begun[slot] = content
        try:
            has_more = self._layers.put_some(slot, MODULES_AT_A_TIME)
        except Exception:
            del self._begun[slot]
            raise
        if not has_more:
            del self._begun[slot]
            self._resident[slot] = content
        return has_more

    def release(self) -> None:
        """Have no adapter on the device until a batch names it."""
        for slot in [*self._resident, *self._begun]:
            self._layers.drop(slot)
        self._resident.clear()
        self._begun.clear()

    def renew(self) -> None:
        """Heed weights of the model that were replaced: DoRA scales by them."""
        self._layers.renew()
