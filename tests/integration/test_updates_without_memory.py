"""Memory that runs out at any moment of any change of weights or adapters: nothing changes.

The worker lacks the memory: it raises what MLX, NumPy and Python raise, before or after an op.
"""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.config import AdapterConfig, EngineConfig, ModelConfig, SchedulerConfig
from mlx_parallm.engine.control import PauseMode
from mlx_parallm.engine.live_weights import WeightsUpdate
from mlx_parallm.engine.local_life import LocalLife
from mlx_parallm.engine.policies import AdapterUpload
from mlx_parallm.serving.async_engine import AsyncEngine
from mlx_parallm.serving.build import build_engines
from mlx_parallm.serving.kinds import ignore_progress
from mlx_parallm.types.errors import OutOfMemoryError
from mlx_parallm.types.request import DEFAULT_VERSION
from mlx_parallm.worker.ops import (
    AddAdapter,
    CommitWeights,
    Op,
    Pending,
    PrepareWeights,
    PutTensors,
    StageAdapter,
    Wake,
)
from mlx_parallm.worker.worker import Worker
from tests.engine_action import Do
from tests.integration.test_live_adapters import adapter, generate, shapes
from tests.integration.test_live_adapters import save as save_adapter
from tests.integration.test_live_weights import CHANGED, folders, tensor_of

__all__ = ["folders", "shapes"]

NAME = "model"
NAMED = "named"
HOARD_BYTES = 8 << 20


def no_array() -> None:
    """Fail as NumPy does."""
    np.empty(1 << 50, np.uint8)


def no_object() -> None:
    """Fail as Python does."""
    raise MemoryError


def no_buffer() -> None:
    """Fail as MLX does on a GPU."""
    raise RuntimeError("[metal::malloc] Attempting to allocate 99 bytes, which is too much.")


FAILURES = [no_array, no_object, no_buffer]


@dataclass
class Fault:
    """A failure that happens once.

    Attributes:
        op: the op that lacks memory; None: none does.
        is_late: it has done its work when it fails.
        fail: raises.
        num_failed: how often it has failed.
    """

    op: type[Op[Any]] | None = None
    is_late: bool = False
    fail: Callable[[], None] = no_array
    num_failed: int = 0


class FaultyWorker(Worker):
    """A worker that lacks memory for an op, of which it may have done a part."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self._fault = fault

    def begin(self, op: Op[Any]) -> Pending[Any]:
        """See ``Worker``."""
        fault = self._fault
        if fault.op is None or not isinstance(op, fault.op):
            return super().begin(op)
        fault.op = None
        fault.num_failed += 1
        pending = super().begin(op) if fault.is_late else None
        hoard = mx.zeros(HOARD_BYTES // 4)
        mx.eval(hoard)
        fault.fail()
        raise AssertionError(f"no failure with {pending} and {hoard.nbytes} bytes")


@pytest.fixture(scope="module")
def fault() -> Fault:
    return Fault()


@pytest.fixture(scope="module")
def engine(
    folders: dict[float, Path],
    shapes: dict[str, tuple[int, ...]],
    fault: Fault,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[AsyncEngine]:
    named = tmp_path_factory.mktemp("adapters")
    save_adapter(named / NAMED, shapes, 1)
    config = EngineConfig(
        models=(ModelConfig(path=str(folders[1.0]), served_names=(NAME,)),),
        scheduler=SchedulerConfig(max_loras=2, max_num_seqs=8),
        adapters=AdapterConfig(
            directory=str(named), allowed_roots=(str(folders[1.0].parent),), max_loaded=4
        ),
    )
    life = LocalLife(
        config,
        ignore_progress,
        build_engines,
        open_worker=lambda *_: nullcontext(FaultyWorker(fault)),
    )
    engine = AsyncEngine(config, life=life)
    engine.start()
    yield engine
    engine.stop()


Change = Callable[[AsyncEngine], Awaitable[object]]


@dataclass
class Sources:
    """Weights and adapters of the changes."""

    folder: Path
    adapter: AdapterWeights

    def tensors(self) -> Change:
        update = WeightsUpdate(tensors={CHANGED: HostTensor(tensor_of(self.folder, CHANGED))})
        return lambda engine: engine.control.update_weights(update)

    def checkpoint(self) -> Change:
        return lambda engine: engine.control.update_weights_from_folder(str(self.folder))

    def upload(self) -> Change:
        upload = AdapterUpload(name="p", weights=self.adapter)
        return lambda engine: engine.control.load_adapter(upload)

    def adapter_folder(self) -> Change:
        return lambda engine: engine.control.load_adapter_folder("p", NAMED)

    def adapter_by_name(self) -> Change:
        return lambda engine: engine.control.ensure_loaded(NAMED, NAME)


@pytest.fixture
def sources(
    folders: dict[float, Path], shapes: dict[str, tuple[int, ...]], tmp_path: Path
) -> Sources:
    return Sources(folders[0.5], adapter(tmp_path, shapes, 2))


#: The ops of each form.
MOMENTS = {
    "tensors": [PutTensors, PrepareWeights, CommitWeights],
    "checkpoint": [PrepareWeights, CommitWeights],
    "upload": [PutTensors, AddAdapter, StageAdapter],
    "adapter_folder": [PutTensors, AddAdapter, StageAdapter],
    "adapter_by_name": [PutTensors, AddAdapter],
}
#: CASES: late faults have more to take back; those of early ones are quick for weights only.
CASES = [
    pytest.param(
        *(form, op, is_late),
        id=f"{form}-{op.__name__}-{'late' if is_late else 'early'}",
        marks=[pytest.mark.slow] * (not is_late and form.startswith(("upload", "adapter"))),
    )
    for form, ops in MOMENTS.items()
    for op in ops
    for is_late in (False, True)
    if not (is_late and op is CommitWeights)
]


async def used(engine: AsyncEngine) -> int:
    """Return the bytes of all arrays."""

    def measure(_loop: object) -> int:
        gc.collect()
        return mx.get_active_memory()

    return await engine.call(Do(measure))


@contextmanager
def failing(fault: Fault, op: type[Op[Any]], *, is_late: bool, number: int) -> Generator[None]:
    """Let an op fail once; it must be asked for."""
    before = fault.num_failed
    fault.op, fault.is_late, fault.fail = op, is_late, FAILURES[number % len(FAILURES)]
    yield
    assert fault.num_failed == before + 1
    assert fault.op is None


async def restore(engine: AsyncEngine, folder: Path) -> None:
    for info in engine.control.adapters():
        await engine.control.unload_adapter(info.name)
    await engine.control.update_weights_from_folder(str(folder), version=DEFAULT_VERSION)


@pytest.mark.parametrize(("form", "op", "is_late"), CASES)
async def test_nothing_changes_without_memory(
    form: str,
    op: type[Op[Any]],
    is_late: bool,
    engine: AsyncEngine,
    fault: Fault,
    folders: dict[float, Path],
    sources: Sources,
) -> None:
    await restore(engine, folders[1.0])
    change: Change = getattr(sources, form)()
    old, memory = await generate(engine, NAME, "old", 4), await used(engine)
    number = [case.values for case in CASES].index((form, op, is_late))
    with (
        failing(fault, op, is_late=is_late, number=number),
        pytest.raises(OutOfMemoryError, match=r"needs \d+ bytes .* \d+ bytes .* free") as caught,
    ):
        await change(engine)
    # The error is still there: it must not hold arrays.
    assert await used(engine) <= memory
    assert caught.value.needed_bytes
    assert caught.value.free_bytes
    assert engine.control.version().label == DEFAULT_VERSION
    assert not await engine.control.look()
    same = await generate(engine, NAME, "same", 4)
    assert (same.tokens, same.logprobs) == (old.tokens, old.logprobs)
    assert set(same.versions) == {DEFAULT_VERSION}
    await change(engine)
    name = {"upload": "p", "adapter_folder": "p", "adapter_by_name": NAMED}.get(form, NAME)
    new = await generate(engine, name, "new", 4)
    assert new.logprobs != old.logprobs
    assert set(new.versions) == {"1"} or form in ("tensors", "checkpoint")


@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
@pytest.mark.parametrize("is_late", [False, True])
async def test_a_server_without_memory_stays_asleep(
    engine: AsyncEngine, fault: Fault, folders: dict[float, Path], tag: str, is_late: bool
) -> None:
    await restore(engine, folders[1.0])
    old = await generate(engine, NAME, "old", 4)
    await engine.control.sleep(2, PauseMode.ABORT)
    with failing(fault, Wake, is_late=is_late, number=1), pytest.raises(OutOfMemoryError):
        await engine.control.wake_up([tag])
    assert engine.control.sleep_level == 2
    assert await engine.control.wake_up() == []
    again = await generate(engine, NAME, "again", 4)
    assert (again.tokens, again.logprobs) == (old.tokens, old.logprobs)
