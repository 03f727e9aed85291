"""The kernels of adapters are right at every shape, and need all their synchronisation."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.adapters.weights import LowRank
from mlx_parallm.kernels.build import KernelSpec
from mlx_parallm.kernels.device_precompiler import CUDA_TYPES
from mlx_parallm.kernels.kernel import KernelText
from mlx_parallm.kernels.precompiled import program_of
from mlx_parallm.worker.lora.adapter_check import why_not
from mlx_parallm.worker.lora.change_kernels import (
    MANY_ROWS,
    MAX_LAYERS,
    MAX_ROWS,
    ChangeKernels,
    _argument_dtype,
    _expand,
    _shrink,
)
from mlx_parallm.worker.lora.kernels import TEXTS
from mlx_parallm.worker.lora.stack import LinearStack
from tests.kernels.mutation import (
    SHIMS,
    Mistake,
    MistakenShim,
    leave_out,
    mutants,
    overlooked,
    passes_in_every_order,
)
from tests.kernels.shim_compile import require_compiler
from tests.kernels.shim_language import Shim

pytestmark = pytest.mark.slow

DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def is_right(shim: Shim, dtype: mx.Dtype = mx.float32) -> bool:
    """True if the check at load passes in every order of threads."""
    kernels = ChangeKernels(shim)
    return passes_in_every_order(shim, lambda: why_not(kernels, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_whole_texts_are_right(shim: Shim, dtype: mx.Dtype) -> None:
    assert is_right(shim, dtype)


@pytest.mark.parametrize(("language", "text", "nth"), list(mutants(TEXTS)))
def test_nothing_can_be_left_out(language: str, text: str, nth: int) -> None:
    require_compiler()
    shim = SHIMS[language]()
    mutated = leave_out(shim, f"adapters_{text}_", nth)
    assert not is_right(shim)
    assert mutated


def test_no_synchronisation_is_overlooked() -> None:
    assert not overlooked(TEXTS)


def test_there_is_something_to_leave_out() -> None:
    all_mutants = list(mutants(TEXTS))
    for language in SHIMS:
        assert sum(mutant[0] == language for mutant in all_mutants) == 2


MISTAKES = {
    "factors of the row before": Mistake("common", "slots[i] != held", "held == 0"),
    "rows without an adapter": Mistake("expand", "= slots[row];", "= slots[row] + 1;"),
    "the first rank alone": Mistake("common", "total + from + j]", "total + from]"),
    "the second layer by the first": Mistake("shrink", "factors = a1;", ""),
    "the third layer's ranks": Mistake("shrink", "rank -= ranks;\nfactors = a2;", "factors = a2;"),
    "the rank of another layer": Mistake(
        "expand", "rank += ranks;\nfactors = b2;", "factors = b2;"
    ),
    "outputs that lie apart": Mistake("expand", "columns = y1_shape[2];", "columns = width;"),
    "the first column": Mistake("expand", "y2 + firsts[2];", "y2;"),
    "the first rows only": Mistake("expand", "pieces * count", "pieces"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_kernel_is_not_used(mistake: str) -> None:
    require_compiler()
    assert not is_right(MistakenShim(TEXTS, "adapters_", MISTAKES[mistake]))


def random_stack(inner: int, out: int, rank: int, slots: int, seed: int) -> LinearStack:
    """Return a float32 stack with an adapter in every slot from 1 on."""
    source = np.random.default_rng(seed)
    stack = LinearStack((out, inner), mx.float32)
    for slot in range(1, slots):
        a, b = (
            HostTensor(source.standard_normal(shape, dtype=np.float32))
            for shape in ((rank, inner), (out, rank))
        )
        stack.put(slot, LowRank(kind="linear", a=a, b=b, scale=0.5))
    mx.eval(stack.arrays())
    return stack


@pytest.mark.parametrize("rows", [1, 2, MANY_ROWS - 1, MANY_ROWS, MANY_ROWS + 1])
@pytest.mark.parametrize(
    ("inner", "outs", "rank"), [(8, [8], 1), (64, [16, 8], 9), (2056, [8, 40, 24], 24)]
)
def test_rows_are_as_operations_of_mlx_give_them(
    shim: Shim, rows: int, inner: int, outs: list[int], rank: int
) -> None:
    source = np.random.default_rng(rows)
    slots = mx.array(source.integers(0, 4, rows), mx.int32)
    stacks = [random_stack(inner, out, rank, 4, seed) for seed, out in enumerate(outs)]
    x, *ys = (
        mx.array(source.standard_normal((rows, 1, size), dtype=np.float32))
        for size in (inner, *outs)
    )
    kernels = ChangeKernels(shim)
    assert all(kernels.serves(x, y, stack, slots) for y, stack in zip(ys, stacks, strict=True))
    actual = kernels(x, ys, stacks, slots)
    for output, y, stack in zip(actual, ys, stacks, strict=True):
        wanted = y + (x @ stack.a[slots].swapaxes(-1, -2)) @ stack.b[slots]
        assert mx.allclose(output, wanted, rtol=1e-4, atol=1e-2 * inner**0.5)
        without = np.array(slots) == 0
        assert np.array_equal(np.array(output)[without], np.array(y)[without])


@pytest.mark.parametrize("layers", range(1, MAX_LAYERS + 1))
@pytest.mark.parametrize("spec", [_shrink, _expand])
def test_they_can_be_compiled_apart_from_mlx(
    spec: Callable[[int], KernelSpec], layers: int
) -> None:
    """Check that kernels use no strides, which MLX does not pass to precompiled kernels."""
    actual = spec(layers)
    assert not actual.strided
    source = (TEXTS / actual.text).read_text()
    text = KernelText("k", actual.inputs, actual.outputs, source, "", strided=False)
    names = (*actual.inputs, *actual.outputs)
    dtypes = [_argument_dtype(name, {"T": mx.bfloat16}) for name in names]
    known = [dtype for dtype in dtypes if dtype is not None]
    assert len(known) == len(names)
    assert program_of(text, known, CUDA_TYPES) is not None


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (mx.zeros((2, 1, 60)), mx.zeros((2, 1, 16))),
        (mx.zeros((2, 1, 64)), mx.zeros((2, 1, 12))),
        (mx.zeros((2, 1, 64), mx.float16), mx.zeros((2, 1, 16), mx.float16)),
        (mx.zeros((2, 2, 64)), mx.zeros((2, 2, 16))),
        (mx.zeros((2, 64)), mx.zeros((2, 16))),
        (mx.zeros((1, 9, 64)), mx.zeros((1, 1, 16))),
        (mx.zeros((MAX_ROWS + 1, 1, 8)), mx.zeros((MAX_ROWS + 1, 1, 8))),
    ],
)
def test_what_they_do_not_serve(x: mx.array, y: mx.array) -> None:
    require_compiler()
    stack = LinearStack((y.shape[-1], x.shape[-1]), mx.float32)
    slots = mx.zeros(x.shape[0], mx.int32)
    assert not ChangeKernels(SHIMS["cuda"]()).serves(x, y, stack, slots)
