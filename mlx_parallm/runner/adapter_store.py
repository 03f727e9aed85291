"""The adapters of one model: kept by content, and put into slots as batches name them."""

from __future__ import annotations

from collections.abc import Mapping

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.runner.adapted_layers import AdaptedLayers

#: What refusals name: the tensors of an upload.
PARAM = "adapter"


class AdapterStore:
    """Implements ``engine.policies.AdapterStore``. Lives on the engine thread."""

    def __init__(self, layers: AdaptedLayers) -> None:
        self._layers = layers
        self._adapters: dict[str, AdapterWeights] = {}
        self._resident: dict[int, str] = {}

    @property
    def num_bytes(self) -> int:
        """Of all slots on the device."""
        return self._layers.num_bytes

    def add(self, adapter: AdapterWeights) -> None:
        """Keep an adapter for later batches.

        Raises:
            InvalidRequestError: the model has no such modules.
        """
        self._layers.check(adapter, param=PARAM)
        self._adapters[adapter.digest] = adapter

    def remove(self, content: str) -> None:
        """Forget an adapter that no later batch names."""
        self._adapters.pop(content, None)

    def place(self, slots: Mapping[int, str]) -> None:
        """Have these adapters in these slots."""
        for slot, content in slots.items():
            if self._resident.get(slot) != content:
                # Whatever fails from here on leaves a slot that is put anew.
                self._resident.pop(slot, None)
                self._layers.put(slot, self._adapters[content], param=PARAM)
                self._resident[slot] = content

    def release(self) -> None:
        """Have no adapter on the device until a batch names it."""
        for slot in self._resident:
            self._layers.drop(slot)
        self._resident.clear()

    def renew(self) -> None:
        """Heed weights of the model that were replaced: DoRA scales by them."""
        self._layers.renew()
