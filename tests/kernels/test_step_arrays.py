"""Arrays go through pinned memory by kernels, here as C++ on memory of this process."""

from __future__ import annotations

import gc
import logging
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_parallm.types.errors import StepError
from mlx_parallm.worker.device import step_arrays
from mlx_parallm.worker.device.step_arrays import (
    NUM_STEPS,
    PIECE,
    Numbers,
    PinnedArrays,
    StepArrays,
)
from tests.kernels.shim_compile import require_compiler
from tests.kernels.shim_language import ORDERS, CudaShim

MISTAKES = {
    "the first four again and again": ("from[thread_position_in_grid.x]", "from[0]"),
    "the first token alone": ("to[i] = tokens[i]", "to[i] = tokens[0]"),
    "nothing is sent": ("i < tokens_shape[0]", "false"),
}


class Memory:
    """Gives out memory and counts it."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, count: int) -> Numbers:
        self.sizes.append(count)
        return np.full(count, -1, np.int32)


@pytest.fixture
def memory() -> Memory:
    require_compiler()
    return Memory()


@pytest.mark.parametrize("size", [1, 7, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE])
def test_numbers_arrive_on_the_device(memory: Memory, size: int) -> None:
    shim = CudaShim()
    for shim.order in ORDERS:
        arrays = PinnedArrays(shim, memory)
        numbers = np.random.default_rng(size).integers(-(2**31), 2**31, size, dtype=np.int32)
        assert (np.array(arrays.fetch(numbers))[:size] == numbers).all()


@pytest.mark.parametrize("size", [1, 255, 256, 257, PIECE + 1])
def test_tokens_arrive_on_the_host(memory: Memory, size: int) -> None:
    arrays = PinnedArrays(CudaShim(), memory)
    tokens = np.random.default_rng(size).integers(0, 2**31, size, dtype=np.uint32)
    copy = arrays.send(mx.array(tokens))
    assert copy.read() == copy.read() == tokens.tolist()


def evaluated_from_now(monkeypatch: pytest.MonkeyPatch) -> list[mx.array]:
    """Return a list that gets all arrays that are evaluated."""
    evaluated: list[mx.array] = []
    original = mx.eval

    def evaluate(*values: Any) -> None:
        arrays = cast("list[tuple[str, mx.array]]", tree_flatten(list(values)))
        evaluated.extend(array for _, array in arrays)
        original(*values)

    monkeypatch.setattr(mx, "eval", evaluate)
    return evaluated


@pytest.mark.parametrize("per_step", [1, 5])
def test_numbers_stay_until_their_step_has_ended(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, per_step: int
) -> None:
    """Check steps that fetch several times, as those with proposals of a draft model do."""
    arrays = PinnedArrays(CudaShim(), memory)
    arrays.begin_step()
    proof = len(memory.sizes)
    fetched: list[list[mx.array]] = []
    evaluated = evaluated_from_now(monkeypatch)

    def waited() -> list[int]:
        """Return what was waited for since the last call, by step."""
        steps = [
            number
            for array in evaluated
            for number, step in enumerate(fetched)
            if any(array is each for each in step)
        ]
        evaluated.clear()
        return steps

    for number in range(10):
        fetched.append([arrays.fetch(np.full(5, number, np.int32)) for _ in range(per_step)])
        assert not waited()
        arrays.begin_step()
        # Memory is used again only once what was fetched from it is there.
        ended = number + 1 - NUM_STEPS
        assert waited() == [ended] * (per_step if ended >= 0 else 0)
    assert len(memory.sizes) <= proof + NUM_STEPS * per_step
    for number, step in enumerate(fetched):
        assert all((np.array(array)[:5] == number).all() for array in step)


def test_what_a_failed_step_was_to_fetch_is_never_evaluated(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = PinnedArrays(CudaShim(), memory)
    lost = arrays.fetch(np.arange(5, dtype=np.int32))
    arrays.forget()
    evaluated = evaluated_from_now(monkeypatch)
    later: list[mx.array] = []
    for number in range(2 * NUM_STEPS):
        arrays.begin_step()
        later.append(arrays.fetch(np.full(5, number, np.int32)))
    assert any(array is later[0] for array in evaluated)
    assert not any(array is lost for array in evaluated)


def test_memory_of_copies_is_used_again_when_none_refers_to_it(memory: Memory) -> None:
    arrays = PinnedArrays(CudaShim(), memory)
    before = len(memory.sizes)
    copies = [arrays.send(mx.full((3,), number, mx.uint32)) for number in range(4)]
    assert [copy.read() for copy in copies] == [[number] * 3 for number in range(4)]
    assert len(memory.sizes) == before + 4
    del copies
    gc.collect()
    again = [arrays.send(mx.full((3,), number, mx.uint32)) for number in range(4)]
    assert [copy.read() for copy in again] == [[number] * 3 for number in range(4)]
    assert len(memory.sizes) == before + 4


def test_memory_that_a_kernel_may_still_fill_is_not_fetched_from(memory: Memory) -> None:
    arrays = PinnedArrays(CudaShim(), memory)
    copy = arrays.send(mx.full((3,), 7, mx.uint32))
    address = copy._pinned.ctypes.data  # type: ignore[attr-defined]
    del copy
    gc.collect()
    arrays.begin_step()
    arrays.fetch(np.arange(3, dtype=np.int32))
    assert arrays._fetched[-1][-1].pinned.ctypes.data != address
    assert arrays.send(mx.array([1], mx.uint32))._pinned.ctypes.data == address  # type: ignore[attr-defined]


def test_larger_arrays_get_more_memory(memory: Memory) -> None:
    arrays = PinnedArrays(CudaShim(), memory)
    for size in (10, 5000, 20, 9000, 5000, 30, 5000, 20000):
        numbers = np.arange(size, dtype=np.int32)
        assert (np.array(arrays.fetch(numbers))[:size] == numbers).all()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_kernels_that_move_other_numbers_are_not_used(memory: Memory, mistake: str) -> None:
    right, wrong = MISTAKES[mistake]
    shim, replaced = CudaShim(), list[str]()

    def mutate(name: str, body: str) -> str:
        if right in body:
            replaced.append(name)
        return body.replace(right, wrong)

    shim.mutate = mutate
    with pytest.raises(StepError, match="do not arrive"):
        PinnedArrays(shim, memory)
    assert replaced


def test_without_a_gpu_mlx_moves_arrays() -> None:
    arrays = step_arrays.step_arrays()
    assert type(arrays) is StepArrays
    numbers = np.arange(5, dtype=np.int32)
    assert arrays.fetch(numbers).tolist() == numbers.tolist()
    assert arrays.send(mx.array([3, 1], mx.uint32)).read() == [3, 1]


def test_without_the_driver_mlx_moves_arrays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(step_arrays, "backend_name", lambda: "cuda")
    with caplog.at_level(logging.WARNING):
        assert type(step_arrays.step_arrays()) is StepArrays
    assert "MLX moves the small arrays of steps" in caplog.text
