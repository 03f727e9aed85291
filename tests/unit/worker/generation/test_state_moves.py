"""States through staging memory that is used again: what was written stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.worker.device.faults import DeviceFaults
from mlx_parallm.worker.device.host_copies import HostCopies
from mlx_parallm.worker.generation.cache_layout import StateEntry, StateLayout
from mlx_parallm.worker.generation.host_moves import HostMoves
from mlx_parallm.worker.generation.state_moves import StateMoves
from mlx_parallm.worker.generation.state_store import StateStore
from tests.unit.worker.device.test_host_copies import cuda_copies

#: LAYOUTS: of two caches, with an array that is never written; no size is a multiple of another.
LAYOUTS = (
    StateLayout((StateEntry((3,), mx.bfloat16), None, StateEntry((5, 3), mx.float32))),
    StateLayout((StateEntry((), mx.int64),)),
)
NUM_BYTES = 6 + 60 + 8


def state_of(number: int) -> bytes:
    return np.random.default_rng(number).integers(0, 256, NUM_BYTES, np.uint8).tobytes()


@pytest.mark.parametrize("make_copies", [HostCopies, cuda_copies])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_states_come_back_bit_for_bit_and_share_no_memory(
    make_copies: Callable[[], HostCopies], *, runs_ahead: bool
) -> None:
    store = StateStore(LAYOUTS)
    moves = HostMoves(
        None, DeviceFaults(), nullcontext, runs_ahead=runs_ahead, make_copies=make_copies
    )
    states = StateMoves(store, moves)
    states.write([4, 7], [state_of(4), state_of(7)]).wait()
    for slot in range(8, 20):
        states.write([slot], [state_of(slot)]).wait()
    store.copy(4, 1)
    for slots in ([4], [7, 8, 19], [1, 12]):
        rows = states.read(slots).wait()
        wanted = [state_of(4 if slot == 1 else slot) for slot in slots]
        assert [bytes(row) for row in rows] == wanted
    (state,) = store.fetch([7])[1]
    assert (state.shape, state.dtype) == ((1,), mx.int64)
    assert store.fetch([7])[0][1] is None
