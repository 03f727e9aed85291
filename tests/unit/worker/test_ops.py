"""Ops are plain, are applied in order, and depend on nothing but the worker's state."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.adapters.weights import AdapterWeights, LowRank, join_adapter, split_adapter
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.worker import ops
from mlx_parallm.worker.device.kernel_trial import KernelTrials
from mlx_parallm.worker.ops import (
    PIECE_BYTES,
    Checksums,
    Done,
    DropTensors,
    Load,
    Pending,
    PutTensors,
    Unload,
    tensor_ops,
)
from mlx_parallm.worker.worker import Device, Worker

ROOT = Path(ops.__file__).parent
#: ``CLOCKS``: what no op may read.
CLOCKS = {"time", "perf_counter", "monotonic", "free_memory_bytes", "get_active_memory"}
#: ``REPORTS``: describes the device to people and to what runs above the worker; no op uses it.
REPORTS = {
    *("device/properties.py", "device/memory_limits.py"),
    *("timing/kernels.py", "timing/products.py", "timing/ranks.py", "timing/tunings.py"),
}
#: ``REFUSES``: refuses an update that does not fit; ranks wait for the verdicts of all.
REFUSES = {"device/room.py"}
#: ``WAITS``: sets from how much memory MLX waits for the device; no result depends on it.
WAITS = {"device/allocator.py"}


class FakeModel:
    """Answers every op with the tensors that there are."""

    def __init__(self) -> None:
        self.is_released = False

    def begin(self, op: Any, tensors: Mapping[str, Any]) -> Pending[Any]:
        return Done({handle: sorted(names) for handle, names in tensors.items()})

    def recover(self) -> None:
        raise AssertionError("no device has failed")

    def release(self) -> None:
        self.is_released = True


class FakeLoad:
    num_bytes = 3

    def __init__(self, *, fails: bool) -> None:
        self.model: FakeModel | None = None
        self.num_stages = 2
        self._fails = fails

    def advance(self) -> None:
        self.num_stages -= 1

    def wait(self) -> str:
        if self._fails:
            raise ModelLoadError("broken")
        self.model = FakeModel()
        return "plan"


class FakeLoader:
    def begin(self, op: Load, device: Device) -> FakeLoad:
        self.load = FakeLoad(fails=op.spec == "broken")
        return self.load


def make() -> tuple[Worker, FakeLoader]:
    worker, loader = Worker(), FakeLoader()
    worker.install(str, loader)
    return worker, loader


def tensor(num_bytes: int) -> HostTensor:
    return HostTensor(np.zeros(num_bytes, np.uint8))


def test_a_model_serves_ops_from_its_load_to_its_unload() -> None:
    worker, loader = make()
    pending: Any = worker.begin(Load(model="m", spec="good"))
    assert (pending.num_bytes, pending.num_stages) == (3, 2)
    with pytest.raises(KeyError):
        worker.execute(Checksums(model="m"))
    pending.advance()
    assert pending.wait() == "plan"
    assert worker.execute(Checksums(model="m")) == {}
    worker.execute(Unload(model="m"))
    assert loader.load.model is not None
    assert loader.load.model.is_released
    worker.execute(Unload(model="m"))
    with pytest.raises(KeyError):
        worker.execute(Checksums(model="m"))


def test_a_load_that_fails_leaves_no_model() -> None:
    worker, _ = make()
    with pytest.raises(ModelLoadError):
        worker.execute(Load(model="m", spec="broken"))
    with pytest.raises(KeyError):
        worker.execute(Checksums(model="m"))


def test_a_model_that_is_taken_is_not_released() -> None:
    worker, loader = make()
    worker.execute(Load(model="m", spec="good"))
    assert worker.take("m") is loader.load.model
    worker.execute(Unload(model="m"))
    assert loader.load.model is not None
    assert not loader.load.model.is_released


def test_tensors_come_in_pieces_and_stay_until_their_handle_is_dropped() -> None:
    worker, _ = make()
    worker.execute(Load(model="m", spec="good"))
    sizes = {"a": PIECE_BYTES, "b": 1, "c": PIECE_BYTES - 1, "d": 2 * PIECE_BYTES, "e": 5}
    pieces = list(tensor_ops("m", "h", {name: tensor(size) for name, size in sizes.items()}))
    assert [list(piece.tensors) for piece in pieces] == [["a"], ["b", "c"], ["d"], ["e"]]
    for piece in pieces:
        worker.execute(piece)
    worker.execute(PutTensors(model="m", handle="other", tensors={}))
    assert worker.execute(Checksums(model="m")) == {"h": list("abcde"), "other": []}
    worker.execute(DropTensors(model="m", handle="h"))
    worker.execute(DropTensors(model="m", handle="h"))
    assert worker.execute(Checksums(model="m")) == {"other": []}


def test_no_tensors_make_a_handle_too() -> None:
    assert list(tensor_ops("m", "h", {})) == [PutTensors(model="m", handle="h", tensors={})]


def low_rank(**more: Any) -> LowRank:
    a, b = (HostTensor(np.ones(shape, np.float32)) for shape in ((2, 6), (4, 2)))
    return LowRank(kind="linear", a=a, b=b, scale=0.5, **more)


def test_an_adapter_is_the_same_after_it_was_split_pickled_and_joined() -> None:
    magnitude = HostTensor(np.arange(4, dtype=np.float32))
    modules = {"x.a": low_rank(), "x.b": low_rank(magnitude=magnitude, changes_head=False)}
    saved = {"score.weight": HostTensor(np.ones((2, 2), np.uint16), is_bfloat16=True)}
    adapter = AdapterWeights(modules, saved, "SEQ_CLS")
    layout, tensors = split_adapter(adapter)
    layout, tensors = pickle.loads(pickle.dumps((layout, tensors)))
    assert join_adapter(layout, tensors).digest == adapter.digest


def test_a_shape_that_another_worker_tried_is_not_tried_again() -> None:
    first = KernelTrials()
    assert first.of("the kernel is").agree((1, 2), lambda: None)
    assert not first.of("the kernel is").agree((1, 3), lambda: "off by 2")
    second = KernelTrials(pickle.loads(pickle.dumps(first.found)))

    def never() -> str:
        raise AssertionError("it was tried again")

    assert second.of("the kernel is").agree((1, 2), never)
    assert not second.of("the kernel is").agree((1, 3), never)
    assert second.of("another kernel is").agree((1, 3), lambda: None)


def test_no_op_reads_a_clock_or_free_memory() -> None:
    reads = {
        (str(file.relative_to(ROOT)), name)
        for file in ROOT.rglob("*.py")
        for name in names_in(ast.parse(file.read_text()))
        if name in CLOCKS
    }
    assert {read for read in reads if read[0] not in REPORTS | REFUSES | WAITS} == set()
    # The search finds a read of a clock where there is one.
    assert ("device/properties.py", "perf_counter") in reads


def names_in(tree: ast.AST) -> set[str]:
    """Return the names that a module imports or reads by attribute."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
    return names
