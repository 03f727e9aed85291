"""The adapters of one pooling model, and the requests that use them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from typing_extensions import override

from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.adapter_slots import AdapterSlots
from mlx_parallm.engine.adapter_users import NoAdapters
from mlx_parallm.engine.device import DeviceAdapters
from mlx_parallm.engine.policies import Policies
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

    @override
    def is_available(self, content: str) -> bool:
        return content in self._slots or self.num_movable > 1


class EncoderAdapterSet:
    """The adapters of a model and the requests that use them.

    They outlive the model's eviction: a reloaded model has them again. Implements
    ``AdapterUsers``.

    Attributes:
        policies: the adapters by name.
        adapters: their slots.
    """

    def __init__(self, name: str, store: DeviceAdapters | None, config: EngineConfig) -> None:
        """Return an empty set.

        Args:
            name: the model's first name.
            store: keeps the adapters' tensors; None if the model takes no adapters.
            config: limits their number.
        """
        # One more slot is uploaded to while batches run.
        self.adapters = BatchSlots(config.scheduler.max_loras + 1)
        self.policies = Policies(
            model=name,
            users=self,
            store=store or NoAdapters(),
            max_loaded=config.adapters.max_loaded,
            max_rank=config.adapters.max_rank,
        )
        self._store = store
        # Requests by their adapter's content; they count from their admission.
        self._open: Counter[str] = Counter()

    def uses(self, content: str) -> bool:
        """See ``AdapterUsers``."""
        return self._open[content] > 0

    def num_running(self, content: str) -> int:
        """See ``AdapterUsers``."""
        return self._open[content]

    def refresh_weights(self) -> None:
        """Do nothing: a request ends with the adapter version that it began with."""

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
        self._open[version.content] += 1
        inputs = tuple(
            replace(item, adapter=version.content, is_cached=version.is_cached)
            for item in request.inputs
        )
        return replace(request, inputs=inputs)

    def end(self, request: PoolRequest) -> None:
        """Release the adapter of a request that ``begin`` returned: it ended or was aborted."""
        if request.adapter is not None:
            content = request.inputs[0].adapter
            assert content is not None, "the request was not begun"
            self._open[content] -= 1
            if not self._open[content]:
                del self._open[content]
            self.policies.forget_unused()

    @contextmanager
    def placed(self, contents: Collection[str]) -> Generator[Mapping[str, int]]:
        """Hold a slot for each adapter within the ``with`` block; yield them by content."""
        slots = {content: self.adapters.acquire(content) for content in contents}
        try:
            if self._store is not None:
                self._store.ensure(contents)
            yield slots
        finally:
            for content in contents:
                self.adapters.release(content)

    def release(self) -> None:
        """Free the adapters' tensors on the device, because the model is evicted."""
        if self._store is not None:
            self._store.release()
        for content in list(self.adapters.resident):
            self.adapters.forget(content)
