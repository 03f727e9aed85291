"""The adapters of one model: kept by content, and put into slots as batches name them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.adapters.weights import AdapterWeights, join_adapter
from mlx_parallm.types.pooling import OwnHead
from mlx_parallm.worker.ops import AddAdapter, Done, DropAdapter, Pending, StageAdapter

AdapterOp = AddAdapter | StageAdapter | DropAdapter

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
    """The adapters that ops may name, by their contents."""

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

    def begin(self, op: AdapterOp, tensors: Mapping[str, Mapping[str, HostTensor]]) -> Pending[Any]:
        """Apply an op; ``tensors`` are by handle."""
        match op:
            case AddAdapter():
                return Done(self.add(op.content, join_adapter(op.layout, tensors[op.handle])))
            case StageAdapter():
                return Done(self.stage(op.slot, op.content, part=op.part))
            case DropAdapter():
                self.remove(op.content)
                return Done(None)

    def add(self, content: str, adapter: AdapterWeights) -> OwnHead | None:
        """Keep an adapter for later batches; return the head that it brings.

        Raises:
            InvalidRequestError: the model has no such modules.
        """
        if content not in self._adapters:
            self._heads[content] = self._layers.check(adapter, param=PARAM)
            self._adapters[content] = adapter
        return self._heads[content]

    def remove(self, content: str) -> None:
        """Forget an adapter that no later batch names."""
        self._adapters.pop(content, None)
        self._heads.pop(content, None)

    def place(self, slots: Mapping[int, str]) -> None:
        """Have these adapters in these slots."""
        for slot, content in slots.items():
            while self.stage(slot, content):
                pass

    def stage(self, slot: int, content: str, *, part: int | None = None) -> bool:
        """Put the next part of an adapter into a slot; return True if there is more.

        ``part`` 0 begins anew; None goes on with what was begun.
        """
        if self._resident.get(slot) == content:
            return False
        if part == 0:
            self._begun.pop(slot, None)
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
