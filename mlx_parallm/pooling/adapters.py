"""The adapters of one encoder, and the requests that use them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, Self

from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.adapter_slots import AdapterSlots
from mlx_parallm.engine.policies import AdapterStore, NoAdapters, Policies
from mlx_parallm.types.errors import ModelLoadingError
from mlx_parallm.types.pooling import EncodeRequest


class BatchSlots(AdapterSlots):
    """Slots that batches take and give back at once: a graph keeps the arrays that it was made of.

    One is left to them, whatever uploads are being put into others.
    """

    @property
    def num_movable(self) -> int:
        """How many adapters of a batch can surely have a slot."""
        return self.num_slots - len(self._pinned | (+self._users).keys())

    def is_available(self, content: str) -> bool:
        """See ``AdapterSlots``."""
        return content in self._slots or self.num_movable > 1


class OpenRequests:
    """The requests that use adapters. Implements ``policies.AdapterUsers``."""

    def __init__(self, num_slots: int) -> None:
        """``num_slots``: most adapters of a batch."""
        # One more for what is being put while batches run.
        self.adapters = BatchSlots(num_slots + 1)
        self._open: Counter[str] = Counter()

    def begin(self, content: str) -> None:
        """A request of an adapter was admitted."""
        self._open[content] += 1

    def end(self, content: str) -> None:
        """It has ended."""
        self._open[content] -= 1
        if not self._open[content]:
            del self._open[content]

    def uses(self, content: str) -> bool:
        """See ``AdapterUsers``."""
        return content in self._open

    def num_running(self, content: str) -> int:
        """See ``AdapterUsers``; requests count from their admission."""
        return self._open[content]

    def refresh_weights(self) -> None:
        """Nothing: a request ends with the adapter that it began with."""


class SlotStore(AdapterStore, Protocol):
    """An ``AdapterStore`` whose slots batches name."""

    def ensure(self, contents: Collection[str]) -> None:
        """Have the tensors of adapters ready for a batch that names them."""
        ...

    def release(self) -> None:
        """Note that no adapter is on the device any more: the model was unloaded."""
        ...


@dataclass(frozen=True, slots=True)
class EncoderAdapterSet:
    """Outlives the model's stay in memory: what was evicted comes back with its adapters.

    Attributes:
        policies: their names.
        requests: that use them.
        store: has their tensors; None where there can be none.
    """

    policies: Policies
    requests: OpenRequests
    store: SlotStore | None = None

    @classmethod
    def empty(cls) -> Self:
        """Of a model that takes no adapters."""
        requests = OpenRequests(0)
        policies = Policies(model="", users=requests, store=NoAdapters(), max_loaded=0)
        return cls(policies, requests)

    @classmethod
    def of_model(cls, name: str, store: SlotStore, config: EngineConfig) -> Self:
        """Of a model of this first name; there are none yet."""
        requests = OpenRequests(config.scheduler.max_loras)
        policies = Policies(
            model=name,
            users=requests,
            store=store,
            max_loaded=config.adapters.max_loaded,
            max_rank=config.adapters.max_rank,
        )
        return cls(policies, requests, store)

    def begin(self, request: EncodeRequest) -> EncodeRequest:
        """A request whose inputs name the content of its adapter, which stays until ``end``.

        Raises:
            ModelNotFoundError: no adapter has the name that it gives.
            ModelLoadingError: the adapter of that name brings another head by now, so that the
                results would not be what the request is for.
        """
        if request.adapter is None:
            return request
        version = self.policies.weights_of(request.adapter).adapter
        assert version is not None, f"{request.adapter} names no adapter"
        if self.policies.head_of(request.adapter) != request.head:
            raise ModelLoadingError(request.adapter)
        self.requests.begin(version.content)
        inputs = tuple(replace(one, adapter=version.content) for one in request.inputs)
        return replace(request, inputs=inputs)

    def end(self, request: EncodeRequest) -> None:
        """A request that ``begin`` gave is answered, or nobody waits for it."""
        if request.adapter is not None:
            content = request.inputs[0].adapter
            assert content is not None, "a request was not begun"
            self.requests.end(content)
            self.policies.forget_unused()

    @contextmanager
    def placed(self, contents: Collection[str]) -> Iterator[Mapping[str, int]]:
        """The slots of adapters while the block runs."""
        adapters = self.requests.adapters
        slots = {content: adapters.acquire(content) for content in contents}
        try:
            if self.store is not None:
                self.store.ensure(contents)
            yield slots
        finally:
            for content in contents:
                adapters.release(content)

    def release(self) -> None:
        """Have no adapter on the device: the model makes way."""
        if self.store is not None:
            self.store.release()
        for content in list(self.requests.adapters.resident):
            self.requests.adapters.forget(content)
