"""The adapters of one model: kept in host memory by content, and put into slots for batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.adapters.weights import AdapterWeights, join_adapter
from mlx_parallm.types.errors import ConflictError
from mlx_parallm.types.pooling import OwnHead
from mlx_parallm.worker.ops import AddAdapter, Done, DropAdapter, Pending, ReadAdapter, StageAdapter

AdapterOp = AddAdapter | StageAdapter | ReadAdapter | DropAdapter

# MODULES_AT_A_TIME are put between two steps: nine layers of seven modules take some milliseconds,
# so that no stream stalls.
MODULES_AT_A_TIME = 63
#: The field of a request that errors name: the tensors of an upload.
PARAM = "adapter"


class SlotTarget(Protocol):
    """A model that has slots for adapters."""

    @property
    def num_bytes(self) -> int:
        """The size of the adapters in all slots, in bytes."""
        ...

    def of_model(self, adapter: AdapterWeights, *, param: str) -> AdapterWeights:
        """Return an adapter as changes of the weights that the model holds.

        Raise InvalidRequestError if it cannot be, or repeats weights of another model.
        """
        ...

    def check(self, adapter: AdapterWeights, *, param: str) -> OwnHead | None:
        """Return the head that an adapter brings; raise InvalidRequestError if it does not fit."""
        ...

    def begin(self, slot: int, adapter: AdapterWeights, *, param: str) -> None:
        """Begin to put an adapter into a slot; raise InvalidRequestError if it does not fit."""
        ...

    def put_modules(self, slot: int, count: int) -> bool:
        """Put a slot's next ``count`` modules after ``begin``; return True if there are more."""
        ...

    def drop(self, slot: int) -> None:
        """Remove the adapter from a slot, if it has one."""
        ...

    def refresh(self) -> None:
        """Compute anew what depends on the model's weights, after these were replaced."""
        ...


class AdapterStore:
    """The adapters that ops may name, by their content ids."""

    def __init__(self, layers: SlotTarget) -> None:
        self._layers = layers
        self._adapters: dict[str, AdapterWeights] = {}
        self._heads: dict[str, OwnHead | None] = {}
        # The content of each slot whose adapter is complete, and of each that is put in part.
        self._resident: dict[int, str] = {}
        self._begun: dict[int, str] = {}

    @property
    def num_bytes(self) -> int:
        """The size of the adapters in all slots, in bytes."""
        return self._layers.num_bytes

    def begin(self, op: AdapterOp, tensors: Mapping[str, Mapping[str, HostTensor]]) -> Pending[Any]:
        """Execute an op; ``tensors`` are the uploaded tensors, by handle and name."""
        match op:
            case AddAdapter():
                return Done(self.add(op.content, join_adapter(op.layout, tensors[op.handle])))
            case StageAdapter():
                return Done(self.stage(op.slot, op.content, part=op.part))
            case ReadAdapter():
                return Done(self.read(op.content))
            case DropAdapter():
                self.remove(op.content)
                return Done(None)

    def add(self, content: str, adapter: AdapterWeights) -> OwnHead | None:
        """Keep an adapter for later batches; return the head that it brings.

        Raises:
            InvalidRequestError: the adapter does not fit the model.
        """
        if content not in self._adapters:
            adapter = self._layers.of_model(adapter, param=PARAM)
            self._heads[content] = self._layers.check(adapter, param=PARAM)
            self._adapters[content] = adapter
        return self._heads[content]

    def read(self, content: str) -> AdapterWeights:
        """Return an adapter; raise ConflictError if it is not kept any more."""
        if content not in self._adapters:
            raise ConflictError("The adapter was unloaded or replaced meanwhile.")
        return self._adapters[content]

    def remove(self, content: str) -> None:
        """Forget an adapter, which no later batch may name."""
        self._adapters.pop(content, None)
        self._heads.pop(content, None)

    def place(self, slots: Mapping[int, str]) -> None:
        """Put these adapters into these slots, as far as they are not there already."""
        for slot, content in slots.items():
            while self.stage(slot, content):
                pass

    def stage(self, slot: int, content: str, *, part: int | None = None) -> bool:
        """Put the next part of an adapter into a slot; return True if there is more.

        ``part`` is the number of the part. 0 begins anew; any other, or None, goes on with what
        was begun.
        """
        if self._resident.get(slot) == content:
            return False
        if part == 0:
            self._begun.pop(slot, None)
        if self._begun.get(slot) != content:
            # If anything fails from here on, the slot counts as empty and is put anew.
            self._resident.pop(slot, None)
            self._begun.pop(slot, None)
            self._layers.begin(slot, self._adapters[content], param=PARAM)
            self._begun[slot] = content
        try:
            has_more = self._layers.put_modules(slot, MODULES_AT_A_TIME)
        except Exception:
            del self._begun[slot]
            # What was put of it takes memory.
            self._layers.drop(slot)
            raise
        if not has_more:
            del self._begun[slot]
            self._resident[slot] = content
        return has_more

    def release(self) -> None:
        """Free the device memory of all slots; later batches put their adapters anew."""
        for slot in [*self._resident, *self._begun]:
            self._layers.drop(slot)
        self._resident.clear()
        self._begun.clear()

    def refresh(self) -> None:
        """Update DoRA's gains, which depend on the model's weights, after these were replaced."""
        self._layers.refresh()
