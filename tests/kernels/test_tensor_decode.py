"""The decode kernel for tensor cores as C++: which layers it takes, and that it is right."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.kernels.kernel import KernelText, kernel_text
from mlx_parallm.worker.attention.kernel_backend import KernelAttention
from mlx_parallm.worker.attention.kernels import TEXTS
from mlx_parallm.worker.attention.quantisation import KVQuantisation
from tests.builders.kernel_cases import Case, Trial
from tests.kernels.attention_trial import is_right
from tests.kernels.mutation import SYNCHRONISATION, leave_out
from tests.kernels.shim_compile import require_compiler
from tests.kernels.tensor_shim import TensorShim

pytestmark = pytest.mark.slow

BFLOAT: dict[str, Any] = {"dtype": mx.bfloat16}
#: ``PLAIN`` has several warps, tiles of a warp, items of a row, and query heads.
PLAIN = Case(sequences=((90, 1), (300, 1), (2, 1), (0, 1)), **BFLOAT)
#: ``LONG`` has three tiles of each of many warps.
LONG = replace(PLAIN, sequences=((90, 1), (620, 1), (0, 1)))
#: ``MANY``: so many rows that no keys are cut, and threadgroups have few warps.
MANY = Case(sequences=((90, 1),) * 35, heads=4, kv_heads=4, sinks=True, **BFLOAT)
CASES = (
    PLAIN,
    Case(sequences=((70, 1), (33, 1)), heads=16, key_dim=128, **BFLOAT),
    # Two threadgroups share the 12 query heads of a KV head.
    Case(sequences=((15, 1), (16, 1)), heads=24, key_dim=128, value_dim=64, dtype=mx.float16),
    Case(sequences=((200, 1),), value_dim=128, block_size=32, window=50, soft_cap=2.0, **BFLOAT),
    Case(sequences=((300, 1), (5, 3)), sinks=True, **BFLOAT),
    Case(sequences=((40, 1),), heads=2, kv_heads=2, dtype=mx.float16),
    LONG,
    MANY,
)
OTHERS = (
    replace(PLAIN, dtype=mx.float32),
    replace(PLAIN, key_dim=96),
    replace(PLAIN, block_size=8),
    replace(PLAIN, distances=40),
    replace(PLAIN, quantisation=KVQuantisation(bits=8, group_size=32)),
)
TEXT = kernel_text(TEXTS / "tensor_cores" / "decode.cu")
#: ``MISTAKES``: a part of the text, and a mistake in its place.
MISTAKES = {
    "a key that is not seen": ("== key ? score[i] : UNSEEN", "== key ? score[i] : score[i]"),
    "the block of this tile for the next": ("block_of(tile + STRIDE)", "block_of(tile)"),
    "the next block for the one after": ("block_of(tile + 2 * STRIDE)", "block_of(tile)"),
    "the sum of another head": ("from_lane(keep, at * 8)", "keep"),
    "keys that are not paired": ("even, odd, 0x7632", "odd, even, 0x7632"),
    "no scale": ("* QUERY_SCALE", "* 1.0f"),
    "columns of the next lane": ("quad * 8 + m * 2 + i / 2", "quad * 8 + m * 2 + 1 - i / 2"),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_right_in_every_order(case: Case) -> None:
    require_compiler()
    shim, made = TensorShim(), list[str]()
    shim.mutate = lambda name, body: made.append(name) or body
    assert is_right(shim, case)
    assert any(name.startswith("paged_decode_") for name in made)


@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_other_layers_take_the_other_kernel(case: Case) -> None:
    shim = TensorShim()
    backend = KernelAttention(case.block_size, shim, quantisation=case.quantisation)
    made: list[str] = []
    shim.mutate = lambda name, body: made.append(name) or body
    trial = Trial(case)
    trial.run(backend, trial.fill(backend))
    assert not any(name.startswith("paged_decode_") for name in made)


@pytest.mark.parametrize("nth", range(len(re.findall(SYNCHRONISATION[".cu"], TEXT))))
def test_nothing_can_be_left_out(nth: int) -> None:
    require_compiler()
    shim = TensorShim()
    mutated = leave_out(shim, "paged_decode_", nth, ".cu")
    assert not is_right(shim, PLAIN)
    assert mutated


def test_there_is_something_to_leave_out() -> None:
    assert len(re.findall(SYNCHRONISATION[".cu"], TEXT)) == 3


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows(mistake: str) -> None:
    require_compiler()
    right, wrong = MISTAKES[mistake]
    assert right in TEXT
    shim = TensorShim()
    # No keys are cut, so that warps take several tiles.
    shim.tuning = replace(shim.tuning, threadgroups=1)
    assert is_right(shim, LONG)
    shim.mutate = lambda name, body: body.replace(right, wrong) if "_decode_" in name else body
    assert not is_right(shim, LONG)


@pytest.mark.parametrize(("case", "warps"), [(PLAIN, 12), (MANY, 4)], ids=str)
def test_few_threadgroups_have_many_warps(case: Case, warps: int) -> None:
    require_compiler()
    shim = SizedShim()
    trial, backend = Trial(case), KernelAttention(case.block_size, shim)
    # The first run compiles and tries all kernels.
    trial.run(backend, trial.fill(backend))
    shim.warps.clear()
    trial.run(backend, trial.fill(backend))
    assert set(shim.warps) == {warps}


class SizedShim(TensorShim):
    """Notes how many warps the threadgroups of decode kernels have."""

    def __init__(self) -> None:
        super().__init__()
        self.warps: list[int] = []

    def make(self, text: KernelText, dtypes: Sequence[mx.Dtype] | None = None) -> Any:
        kernel = super().make(text, dtypes)

        def noted(**options: Any) -> list[mx.array]:
            if "_decode_" in text.name:
                self.warps.append(options["threadgroup"][0] // 32)
            return kernel(**options)

        return noted


def test_weights_are_not_rounded_to_16_bits() -> None:
    """Outputs are those of the kernel that computes in float32; without the rests, many differ."""
    require_compiler()

    def same(body_of: Any) -> float:
        case = Case(sequences=((2, 1), (3, 1), (30, 1)), **BFLOAT)
        trial, outputs = Trial(case), list[np.ndarray]()
        for has_tensor_cores in (False, True):
            shim = TensorShim()
            shim.has_tensor_cores = has_tensor_cores
            shim.mutate = body_of
            backend = KernelAttention(case.block_size, shim)
            outputs.append(np.array(trial.run(backend, trial.fill(backend)).astype(mx.float32)))
        return float((outputs[0] == outputs[1]).mean())

    assert same(lambda _, body: body) > 0.99
    assert same(lambda _, body: body.replace("columns[1], rests", "columns[1], none")) < 0.9
