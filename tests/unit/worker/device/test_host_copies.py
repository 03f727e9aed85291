"""Copies between arrays and host memory: by MLX, and by a driver that is played here."""

from __future__ import annotations

import ctypes
import gc
import mmap
from typing import Any, cast

import mlx.core as mx
import pytest

from mlx_parallm.types.errors import StepError
from mlx_parallm.worker.device import host_copies, pinned_memory
from mlx_parallm.worker.device.host_copies import CudaCopies, HostCopies, PinnedSlots, PlainCopies

ROWS = [bytes([number] * 64) for number in range(1, 6)]


class FakeDriver:
    """The calls of the CUDA driver that copies make, on the memory of this process."""

    def __init__(self) -> None:
        self.is_managed = True
        self.failing: set[str] = set()
        self.arenas: list[mmap.mmap] = []
        self.contexts: list[Any] = []
        self.pinned: set[int] = set()

        def copy(target: int, source: int, num_bytes: int, stream: Any) -> int:
            del stream
            ctypes.memmove(target, source, num_bytes)
            return self._code("copy")

        # The real one is a function too, whose argument types are set.
        self.cuMemcpyAsync = copy

    def _code(self, call: str) -> int:
        return 2 if call in self.failing else 0

    def cuStreamCreate(self, stream: Any, flags: int) -> int:
        assert flags == host_copies.NON_BLOCKING
        stream._obj.value = 7
        return self._code("stream")

    def cuStreamSynchronize(self, stream: Any) -> int:
        assert stream.value == 7
        return self._code("wait")

    def cuPointerGetAttribute(self, result: Any, attribute: int, address: Any) -> int:
        assert attribute == host_copies.IS_MANAGED
        assert address.value
        result._obj.value = int(self.is_managed)
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = 9
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.contexts.append(context.value)
        return 0

    def cuMemHostAlloc(self, address: Any, size: Any, flags: int) -> int:
        assert flags == pinned_memory.PORTABLE
        if "pin" in self.failing:
            return 2
        arena = mmap.mmap(-1, size.value)
        self.arenas.append(arena)
        address._obj.value = ctypes.addressof(ctypes.c_char.from_buffer(arena))
        self.pinned.add(address._obj.value)
        return 0

    def cuMemFreeHost(self, address: Any) -> int:
        self.pinned.remove(address.value)
        return 0


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "ARENA_BYTES", 4 * 64)
    monkeypatch.setattr(host_copies, "AHEAD_BYTES", 8 * 64)


def cuda_copies(driver: FakeDriver | None = None) -> CudaCopies:
    return CudaCopies(cast("Any", driver or FakeDriver()))


def slots_of(driver: FakeDriver) -> PinnedSlots:
    slots = PinnedSlots(cast("Any", driver), 64)
    slots._growing.join()
    return slots


@pytest.mark.parametrize("make", [HostCopies, PlainCopies, cuda_copies])
def test_rows_come_back_bit_for_bit(make: Any) -> None:
    copies: HostCopies = make()
    staged = copies.stage([ROWS[0], memoryview(ROWS[1]), bytearray(ROWS[2])])
    assert staged.rows.shape == (3, 64)
    shifted = staged.rows + mx.array([1], mx.uint8)
    mx.eval(shifted)
    rows = copies.rows(shifted)
    assert [bytes(row) for row in rows] == [bytes(x + 1 for x in row) for row in ROWS[:3]]
    assert all(len(row) == 64 for row in rows)


def test_staging_memory_is_used_again_only_once_it_is_given_back() -> None:
    copies = cuda_copies()
    first, second = copies.stage(ROWS[:3]), copies.stage(ROWS[2:])
    assert first.memory is not second.memory
    assert bytes(copies.rows(first.rows)[0]) == ROWS[0]
    copies.give_back(first)
    third = copies.stage(ROWS[:4])
    assert third.memory is first.memory
    assert [bytes(row) for row in copies.rows(third.rows)] == ROWS[:4]
    assert [bytes(row) for row in copies.rows(second.rows)] == ROWS[2:]


def test_pinned_memory_is_free_again_once_no_view_of_it_is_left() -> None:
    driver = FakeDriver()
    slots = slots_of(driver)
    views = [slots.take().data for _ in range(8)]
    slots._growing.join()
    num_arenas = len(driver.arenas)
    addresses = {ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in views}
    assert len(addresses) == 8
    kept = views.pop()[10:20]
    views.clear()
    gc.collect()
    taken = [slots.take() for _ in range(7)]
    assert len(driver.arenas) == num_arenas
    assert ctypes.addressof(ctypes.c_char.from_buffer(kept)) - 10 not in {
        each.ctypes.data for each in taken
    }


def test_pinned_memory_is_freed_with_the_model_once_no_view_of_it_is_left() -> None:
    driver = FakeDriver()
    copies = cuda_copies(driver)
    rows = copies.rows(copies.stage(ROWS).rows)
    copies._slots[64]._growing.join()
    assert len(driver.pinned) == len(driver.arenas) > 2
    kept = rows.pop()
    del copies, rows
    gc.collect()
    assert driver.pinned
    assert bytes(kept) == ROWS[-1]
    del kept
    gc.collect()
    assert not driver.pinned


def test_memory_is_pinned_ahead_on_another_thread_in_the_same_context() -> None:
    driver = FakeDriver()
    slots = slots_of(driver)
    assert (len(driver.arenas), driver.contexts) == (2, [9])
    held = [slots.take()]
    slots._growing.join()
    assert (len(driver.arenas), driver.contexts) == (2, [9])
    held.append(slots.take())
    slots._growing.join()
    assert (len(driver.arenas), driver.contexts) == (3, [9, 9])


def test_memory_that_is_kept_for_long_is_pinned_at_once() -> None:
    driver = FakeDriver()
    copies = cuda_copies(driver)
    copies.reserve(64, 40 * 64)
    copies._slots[64]._growing.join()
    num_arenas = len(driver.arenas)
    assert num_arenas >= 10 + 1
    staged = copies.stage(ROWS)
    rows = [row for _ in range(6) for row in copies.rows(staged.rows)]
    copies._slots[64]._growing.join()
    assert len(rows) == 30
    assert len(driver.arenas) == num_arenas


def test_a_lack_of_pinned_memory_is_an_error_of_the_step() -> None:
    driver = FakeDriver()
    slots = slots_of(driver)
    driver.failing.add("pin")
    held = [slots.take() for _ in range(8)]
    with pytest.raises(StepError, match="pin memory: error 2"):
        slots.take()
    del held
    gc.collect()
    assert slots.take().nbytes == 64


@pytest.mark.parametrize("call", ["stream", "copy", "wait"])
def test_a_driver_that_cannot_copy_is_not_used(call: str) -> None:
    driver = FakeDriver()
    driver.failing.add(call)
    with pytest.raises(StepError, match="error 2"):
        cuda_copies(driver)


def test_arrays_elsewhere_are_not_copied_by_the_driver() -> None:
    driver = FakeDriver()
    driver.is_managed = False
    with pytest.raises(StepError, match="managed"):
        cuda_copies(driver)


def test_other_devices_have_views() -> None:
    assert type(host_copies.host_copies()) is HostCopies
    array = mx.arange(6, dtype=mx.uint8).reshape(2, 3)
    mx.eval(array)
    assert [bytes(row) for row in HostCopies().rows(array)] == [b"\0\1\2", b"\3\4\5"]
    with pytest.raises(TypeError, match="read-only"):
        cast("memoryview", HostCopies().rows(array)[0])[0] = 1
