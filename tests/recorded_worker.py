"""A worker whose ops are written down, and a process that applies them once more."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mlx_parallm.config import CacheConfig
from mlx_parallm.engine.kind import KindBuilder
from mlx_parallm.generation.build import GenerationBuilder
from mlx_parallm.pooling.build import PoolingBuilder
from mlx_parallm.serving.build import BUILDERS
from mlx_parallm.worker.attention import backend_choice
from mlx_parallm.worker.attention.backend_choice import BackendChoice
from mlx_parallm.worker.generation.load import image_check, path_choice
from mlx_parallm.worker.generation.load.loading import GenerationLoader
from mlx_parallm.worker.generation.load.plan import GenerationSpec
from mlx_parallm.worker.lora import adapter_check, adapter_store
from mlx_parallm.worker.ops import Allocate, Load, Op, Pending
from mlx_parallm.worker.sampling import check as sampling_check
from mlx_parallm.worker.worker import Worker
from tests.compiled_attention import CompiledAttention

#: Modules of an adapter that one op puts: the demonstration model has few.
MODULES = 3
#: What decides when a worker has no plan.
DECISIONS = (
    (path_choice, "check_path"),
    (image_check, "agrees_with"),
    (backend_choice, "_judge"),
    (sampling_check, "why_not"),
    (adapter_check, "why_not"),
)


@dataclass(frozen=True)
class Begun:
    """An op as it was begun, pickled then."""

    op: bytes


@dataclass(frozen=True)
class Advanced:
    """A stage of the op of this number was computed."""

    number: int


@dataclass(frozen=True)
class Waited:
    """The result of the op of this number, or the class of its error."""

    number: int
    result: Any


Record = Begun | Advanced | Waited


class _Packer(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        # What blocks hold may be a view of an array.
        return (bytes, (bytes(obj),)) if isinstance(obj, memoryview) else NotImplemented


def packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Packer(buffer).dump(value)
    return buffer.getvalue()


class RecordingWorker(Worker):
    """Writes down what it is asked to do, in order, and what came of it."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Record] = []
        self._count = 0

    def begin(self, op: Op[Any]) -> Pending[Any]:
        self.records.append(Begun(packed(op)))
        number, self._count = self._count, self._count + 1
        try:
            return RecordedOp(super().begin(op), number, self.records)
        except Exception as cause:
            self.records.append(Waited(number, type(cause)))
            raise


class RecordedOp:
    def __init__(self, pending: Pending[Any], number: int, records: list[Record]) -> None:
        self._pending = pending
        self._number = number
        self._records = records

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pending, name)

    @property
    def num_stages(self) -> int:
        return self._pending.num_stages

    def advance(self) -> None:
        self._records.append(Advanced(self._number))
        self._pending.advance()

    def wait(self) -> Any:
        try:
            result = self._pending.wait()
        except Exception as cause:
            self._records.append(Waited(self._number, type(cause)))
            raise
        self._records.append(Waited(self._number, result))
        return result


class AheadKind(GenerationBuilder):
    """Models whose steps run ahead, and whose decode steps are compiled."""

    def install(self, worker: Worker) -> None:
        worker.install(GenerationSpec, GenerationLoader(compiled_attention))


def kinds_of(*, ahead: bool) -> tuple[KindBuilder, ...]:
    return (PoolingBuilder(), AheadKind()) if ahead else BUILDERS


def compiled_attention(cache: CacheConfig, *_: Any, **__: Any) -> BackendChoice:
    return BackendChoice(CompiledAttention(cache.block_size), 0.0)


def plans_of(records: Sequence[Record]) -> dict[str, Any]:
    """Return the last plan of every model."""
    results = {record.number: record.result for record in records if isinstance(record, Waited)}
    begun = [pickle.loads(record.op) for record in records if isinstance(record, Begun)]
    return {
        op.model: results[number]
        for number, op in enumerate(begun)
        if isinstance(op, Load | Allocate)
    }


def replay(records: Sequence[Record], *, ahead: bool) -> list[Any]:
    """Apply recorded ops to a new worker, which decides nothing; the results, in order."""
    worker = Worker()
    for kind in kinds_of(ahead=ahead):
        kind.install(worker)
    plans = plans_of(records)
    pending: list[Any] = []
    results: list[Any] = []
    for record in records:
        match record:
            case Begun():
                op = pickle.loads(record.op)
                if isinstance(op, Load):
                    op = replace(op, plan=plans[op.model])
                try:
                    pending.append(worker.begin(op))
                except Exception as cause:  # noqa: BLE001 - compared with the recorded one
                    pending.append(cause)
            case Advanced():
                pending[record.number].advance()
            case Waited():
                results.append(result_of(pending[record.number]))
    return results


def result_of(pending: Any) -> Any:
    if isinstance(pending, Exception):
        return type(pending)
    try:
        return pending.wait()
    except Exception as cause:  # noqa: BLE001 - compared with the recorded one
        return type(cause)


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("a worker with a plan decides nothing")


def main(recorded: str, replayed: str, ahead: str) -> None:
    """Be the other process: read records from a file, and write the results to another."""
    records = pickle.loads(Path(recorded).read_bytes())
    patches = [patch.object(adapter_store, "MODULES_AT_A_TIME", MODULES)]
    patches += [patch.object(module, name, refuse) for module, name in DECISIONS]
    for patched in patches:
        patched.start()
    Path(replayed).write_bytes(packed(replay(records, ahead=ahead == "ahead")))
