"""The adapters of one model: kept by content, and put into slots as batches name them."""

from __future__ import annotations

from collections.abc import Mapping

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.runner.adapted_layers import AdaptedLayers

# Six layers of seven, put between two steps: a few milliseconds, so that no stream stalls.
MODULES_AT_A_TIME = 42
#: What refusals name: the tensors of an upload.
PARAM = "adapter"


class AdapterStore:
    """Implements ``engine.policies.AdapterStore``. Lives on the engine thread."""

    def __init__(self, layers: AdaptedLayers) -> None:
        self._layers = layers
        self._adapters: dict[str, AdapterWeights] = {}
        self._resident: dict[int, str] = {}
        # Slots of which a part has been put.
        self._begun: dict[int, str] = {}

    @property
    def num_bytes(self) -> int:
        """Of all slots on the device."""
        return self._layers.num_bytes

    def add(self, adapter: AdapterWeights) -> None:
        """Keep an adapter for later batches.

        Raises:
            InvalidRequestError: the model has no such modules.
        """
        if adapter.digest not in self._adapters:
            self._layers.check(adapter, param=PARAM)
            self._adapters[adapter.digest] = adapter

    def remove(self, content: str) -> None:
        """Forget an adapter that no later batch names."""
        self._adapters.pop(content, None)

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
