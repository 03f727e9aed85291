"""Memory that is looked for, named, and given back."""

from __future__ import annotations

import gc
import pickle

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.distributed.log import Refused
from mlx_parallm.types.errors import InvalidRequestError, OutOfMemoryError
from mlx_parallm.worker.device.room import check_room, lacks_memory, naming_lack

TOO_MUCH = 1 << 60


def test_what_does_not_fit_is_refused_with_both_sizes() -> None:
    check_room(1, "A byte")
    with pytest.raises(OutOfMemoryError, match=rf"An update needs {TOO_MUCH} bytes") as caught:
        check_room(TOO_MUCH, "An update")
    assert caught.value.needed_bytes == TOO_MUCH
    free = caught.value.free_bytes
    assert free is not None
    assert f"{free} bytes" in str(caught.value)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.needed_bytes, copy.free_bytes) == (TOO_MUCH, free)


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("[malloc] Unable to allocate 8 bytes."), True),
        (RuntimeError("[metal::malloc] Resource limit (499000) exceeded."), True),
        (RuntimeError("cudaMallocAsync(&data, size) failed: out of memory"), True),
        (OutOfMemoryError("no"), True),
        (RuntimeError("[matmul] Last dimension of the first input differs."), False),
        (ValueError("out of memory"), False),
        (InvalidRequestError("no"), False),
    ],
)
def test_only_failed_allocations_are_a_lack_of_memory(
    problem: Exception, *, expected: bool
) -> None:
    assert lacks_memory(problem) is expected
    kind = OutOfMemoryError if expected else type(problem)
    with pytest.raises(kind), naming_lack("An update", 7):
        raise problem


def test_arrays_of_failed_frames_are_freed_while_the_error_lives() -> None:
    def hoard() -> None:
        array = mx.zeros(1 << 20)
        mx.eval(array)
        np.empty(1 << 50, np.uint8)

    gc.collect()
    before = mx.get_active_memory()
    named = pytest.raises(OutOfMemoryError, match=r"needs 7 bytes .* free .*Unable to all")
    with named as caught, naming_lack("An update", 7):
        hoard()
    assert mx.get_active_memory() == before
    assert caught.value.needed_bytes == 7


def test_what_another_rank_lacks_is_named_by_what_was_asked() -> None:
    refusal = Refused.of(MemoryError("on rank 1"))
    named = pytest.raises(OutOfMemoryError, match=r"needs 7 bytes .*on rank 1")
    with named as caught, naming_lack("An update", 7):
        raise pickle.loads(pickle.dumps(refusal)).error
    assert isinstance(refusal.error, OutOfMemoryError)
    assert caught.value.free_bytes == refusal.error.free_bytes
