"""Products of one row that follow each other in one launch."""

from __future__ import annotations

import itertools

import mlx.core as mx
import pytest

from benchmarks.gpu.check_packed import block_chain
from mlx_parallm.worker.layers.chain_trial import ChainTrial
from mlx_parallm.worker.layers.packed_kernel import PackedKernels
from mlx_parallm.worker.layers.packing import MXFP4, Packing
from mlx_parallm.worker.layers.product_variants import Format
from tests.kernels.shim_compile import require_compiler
from tests.kernels.shim_language import ORDERS, KernelError
from tests.kernels.tensor_shim import TensorShim

pytestmark = pytest.mark.slow

Q4 = Format(Packing(4, 64), mx.bfloat16)
FORMS = (
    *(Format(Packing(bits, size), mx.bfloat16) for bits in (4, 8) for size in (32, 64)),
    *(Format(Packing(bits, 64), mx.float16) for bits in (4, 8)),
    Format(Packing(4, 32, MXFP4), mx.bfloat16),
)
#: ``SIZES``: of queries, hidden states and the MLP; each is another one.
SIZES = (1536, 512, 1024)
#: ``MISTAKES``: a part of the text, and a mistake in its place.
MISTAKES = {
    "another residual": ("residual = out_0;", "residual = hidden;"),
    "another input": ("x = out_0;", "x = rows;"),
    "no wait": ("await_threadgroups(arrivals_pool + (LINK - 2) * SPACING, AWAITED);", ""),
    "a wait for too few": ("AWAITED = 32;", "AWAITED = 31;"),
    "a wait for too few gates": ("AWAITED = 128;", "AWAITED = 127;"),
    "other threadgroups": ("FIRST = 32;", "FIRST = 31;"),
}
#: ``ENDLESS``: mistakes after which threadgroups would wait for ever.
ENDLESS = {
    "a wait for another product": ("arrivals_pool + (LINK - 2) * SPACING, A", "arrivals_pool, A"),
    "no arrival": ("arrive_threadgroup((unsigned*)arrivals_pool + (LINK - 1) * SPACING);", ""),
    "an arrival elsewhere": ("arrivals_pool + (LINK - 1) * SPACING", "arrivals_pool"),
    "a wait for too many": ("AWAITED = 32;", "AWAITED = 33;"),
}


def error_of(shim: TensorShim, form: Format = Q4) -> float:
    return ChainTrial(PackedKernels(shim), block_chain(form, *SIZES)).largest_error(2)


@pytest.mark.parametrize(("form", "order"), [*zip(FORMS, itertools.cycle(ORDERS))], ids=str)
def test_a_chain_computes_what_its_products_do(form: Format, order: int) -> None:
    require_compiler()
    shim = TensorShim()
    shim.order = order
    assert error_of(shim, form) == 0


def test_threadgroups_with_several_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threadgroups take several panels of a weight."""
    require_compiler()
    monkeypatch.setattr("mlx_parallm.worker.layers.product_variants.PROCESSORS", 6)
    chain = block_chain(Q4, *SIZES)
    assert [link.threadgroups for link in chain.links] == [11, 12, 11]
    assert error_of(TensorShim()) == 0


def mutated(right: str, wrong: str) -> TensorShim:
    """Return a shim in which chains have a mistake, and products alone have none."""
    shim = TensorShim()

    def mutate(_: str, body: str) -> str:
        if "rows_shape" not in body:
            return body
        assert right in body
        return body.replace(right, wrong)

    shim.mutate = mutate
    return shim


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows(mistake: str) -> None:
    require_compiler()
    assert error_of(mutated(*MISTAKES[mistake])) > 0


@pytest.mark.parametrize("mistake", ENDLESS)
def test_threadgroups_that_would_wait_for_ever_are_found(mistake: str) -> None:
    require_compiler()
    with pytest.raises(KernelError, match="wait for each other"):
        error_of(mutated(*ENDLESS[mistake]))
