"""One model's state on the device, as the bookkeeping sees it: every change is an op."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path

from typing_extensions import override

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.adapters.weights import AdapterWeights, split_adapter
from mlx_parallm.engine.adapter_users import AdapterHead, TensorStore
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.worker.device.room import naming_lack
from mlx_parallm.worker.ops import (
    AddAdapter,
    Checksums,
    CommitWeights,
    DropAdapter,
    DropPrepared,
    DropTensors,
    PrepareWeights,
    Sleep,
    StageAdapter,
    Wake,
    tensor_ops,
)
from mlx_parallm.worker.worker import Worker

# What takes memory, in errors.
ADAPTER = "An adapter"
UPDATE = "An update of weights"


class DeviceAdapters(TensorStore):
    """The adapters of one model. Implements ``TensorStore``; lives on the engine thread.

    It keeps the tensors of adapters, so that a model that was evicted comes back with its own.
    """

    def __init__(self, worker: Worker, model: str) -> None:
        self._worker = worker
        self._model = model
        self._adapters: dict[str, AdapterWeights] = {}
        # What the worker has, by content; it loses all when the model is unloaded.
        self._heads: dict[str, AdapterHead | None] = {}
        self._parts: dict[tuple[int, str], int] = {}

    @override
    def add(self, content: str, adapter: AdapterWeights) -> AdapterHead | None:
        if content not in self._heads:
            self._heads[content] = self._send(content, adapter)
            self._adapters[content] = adapter
        return self._heads[content]

    @override
    def stage(self, slot: int, content: str) -> bool:
        self.ensure([content])
        part = self._parts.pop((slot, content), 0)
        op = StageAdapter(model=self._model, content=content, slot=slot, part=part)
        with naming_lack(ADAPTER, self._adapters[content].num_bytes):
            has_more = self._worker.execute(op)
        if has_more:
            self._parts[slot, content] = part + 1
        return has_more

    @override
    def remove(self, content: str) -> None:
        self._adapters.pop(content, None)
        if content in self._heads:
            del self._heads[content]
            self._worker.execute(DropAdapter(model=self._model, content=content))

    def ensure(self, contents: Iterable[str]) -> None:
        """Send the worker the adapters that the next op names, unless it has them."""
        for content in contents:
            if content not in self._heads:
                self._heads[content] = self._send(content, self._adapters[content])

    def release(self) -> None:
        """Note that the worker has none of the adapters, because the model was unloaded."""
        self._heads.clear()
        self._parts.clear()

    def _send(self, content: str, adapter: AdapterWeights) -> AdapterHead | None:
        layout, tensors = split_adapter(adapter)
        handle = f"{self._model} {content}"
        with naming_lack(ADAPTER, adapter.num_bytes):
            try:
                for op in tensor_ops(self._model, handle, tensors):
                    self._worker.execute(op)
                return self._worker.execute(
                    AddAdapter(model=self._model, content=content, layout=layout, handle=handle)
                )
            finally:
                self._worker.execute(DropTensors(model=self._model, handle=handle))


class DeviceWeights:
    """The weights and the KV pool of one model; ``LiveWeights`` has their versions."""

    def __init__(self, worker: Worker, model: str) -> None:
        self._worker = worker
        self._model = model
        self._numbers = count()
        # The size of the update that was prepared last.
        self._num_bytes = 0

    def prepare_folder(self, folder: Path) -> None:
        """Prepare all weights of a checkpoint; raise InvalidRequestError if they do not fit."""
        num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        self._prepare(PrepareWeights(model=self._model, folder=folder), num_bytes)

    def prepare_tensors(self, tensors: Mapping[str, HostTensor]) -> None:
        """Prepare some weights; raise InvalidRequestError if they do not fit."""
        handle = f"{self._model} weights {next(self._numbers)}"
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        with naming_lack(UPDATE, num_bytes):
            try:
                for op in tensor_ops(self._model, handle, tensors):
                    self._worker.execute(op)
                self._prepare(PrepareWeights(model=self._model, handle=handle), num_bytes)
            finally:
                self._worker.execute(DropTensors(model=self._model, handle=handle))

    def _prepare(self, op: PrepareWeights, num_bytes: int) -> None:
        with naming_lack(UPDATE, num_bytes):
            refusal = self._worker.execute(op)
        self._num_bytes = num_bytes
        if refusal is not None:
            raise InvalidRequestError(refusal, param="weights")

    def commit(self) -> None:
        """Compute with the prepared weights from now on; no step may be in flight."""
        with naming_lack(UPDATE, self._num_bytes):
            self._worker.execute(CommitWeights(model=self._model))

    def drop_prepared(self) -> None:
        """Forget the prepared weights, if there are any."""
        self._worker.execute(DropPrepared(model=self._model))

    def checksums(self) -> dict[str, str]:
        """Return the SHA-256 of each weight, in hex by name."""
        return self._worker.execute(Checksums(model=self._model))

    def sleep(self, level: int) -> None:
        """Free the memory of KV, adapters and weights; see ``LiveWeights.sleep``."""
        self._worker.execute(Sleep(model=self._model, level=level))

    def wake(self, tag: str) -> bool:
        """Allocate a tag's memory; True if weights were read from the folder loaded last."""
        with naming_lack(UPDATE, None):
            return self._worker.execute(Wake(model=self._model, tag=tag))
