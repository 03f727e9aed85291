"""The adapters of one pooling model, and the requests that use them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, Self

from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.adapter_slots import AdapterSlots
from mlx_parallm.engine.policies import AdapterStore, NoAdapters, Policies
from mlx_parallm.types.errors import ModelLoadingError
from mlx_parallm.types.pooling import PoolRequest


class BatchSlots(AdapterSlots):
    """Adapter slots that a batch holds only while its graph is built.

    A graph keeps the arrays it was built from, so a slot can be reused at once. One slot is always
    left to batches, whatever adapters are being uploaded to others.
    """

    @property
    def num_movable(self) -> int:
        """Return how many different adapters a batch may name."""
        return self.num_slots - len(self._pinned | (+self._users).keys())

    def is_available(self, content: str) -> bool:
        """See ``AdapterSlots``."""
        return content in self._slots or self.num_movable > 1


class OpenRequests:
    """The requests that use adapters. Implements ``policies.AdapterUsers``."""

    def __init__(self, num_slots: int) -> None:
        """``num_slots``: most adapters of a batch."""
        # One more slot is uploaded to while batches run.
        self.adapters = BatchSlots(num_slots + 1)
        self._open: Counter[str] = Counter()

    def begin(self, content: str) -> None:
        """Count a request of an adapter when it is admitted."""
        self._open[content] += 1

    def end(self, content: str) -> None:
        """Count a request of an adapter as ended."""
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
        """Do nothing: a request ends with the adapter version that it began with."""


class SlotStore(AdapterStore, Protocol):
    """An ``AdapterStore`` with slots that batches name."""

    def ensure(self, contents: Collection[str]) -> None:
        """Load adapters that a batch names and that are not on the device yet."""
        ...

    def release(self) -> None:
        """Note that no adapter is on the device any more: the model was unloaded."""
        ...


@dataclass(frozen=True, slots=True)
class EncoderAdapterSet:
    """The adapters of a model, which outlive its eviction: a reloaded model has them again.

    Attributes:
        policies: the adapters by name.
        requests: the requests that use them.
        store: keeps their tensors; None if the model takes no adapters.
    """

    policies: Policies
    requests: OpenRequests
    store: SlotStore | None = None

    @classmethod
    def empty(cls) -> Self:
        """Return the set of a model that takes no adapters."""
        requests = OpenRequests(0)
        policies = Policies(model="", users=requests, store=NoAdapters(), max_loaded=0)
        return cls(policies, requests)

    @classmethod
    def of_model(cls, name: str, store: SlotStore, config: EngineConfig) -> Self:
        """Return an empty set for the model with this first name."""
        requests = OpenRequests(config.scheduler.max_loras)
        policies = Policies(
            model=name,
            users=requests,
            store=store,
            max_loaded=config.adapters.max_loaded,
            max_rank=config.adapters.max_rank,
        )
        return cls(policies, requests, store)

    def begin(self, request: PoolRequest) -> PoolRequest:
        """Return the request with inputs that name its adapter's content, kept until ``end``.

        Raises:
            ModelNotFoundError: no adapter has the requested name.
            ModelLoadingError: the adapter was replaced by one with another head, so that the
                results would not have the shape that the client expects.
        """
        if request.adapter is None:
            return request
        version = self.policies.weights_of(request.adapter).adapter
        assert version is not None, f"{request.adapter} names no adapter"
        if self.policies.head_of(request.adapter) != request.head:
            raise ModelLoadingError(request.adapter)
        self.requests.begin(version.content)
        inputs = tuple(replace(item, adapter=version.content) for item in request.inputs)
        return replace(request, inputs=inputs)

    def end(self, request: PoolRequest) -> None:
        """Release the adapter of a request that ``begin`` returned: it ended or was aborted."""
        if request.adapter is not None:
            content = request.inputs[0].adapter
            assert content is not None, "the request was not begun"
            self.requests.end(content)
            self.policies.forget_unused()

    @contextmanager
    def placed(self, contents: Collection[str]) -> Generator[Mapping[str, int]]:
        """Hold a slot for each adapter within the ``with`` block; yield them by content."""
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
        """Free the adapters' tensors on the device, because the model is evicted."""
        if self.store is not None:
            self.store.release()
        for content in list(self.requests.adapters.resident):
            self.requests.adapters.forget(content)
