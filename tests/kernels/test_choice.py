"""The kernels of a quantised pool are used only if they are right."""

from __future__ import annotations

import re

import mlx.core as mx
import pytest

from mlx_parallm.config import CacheConfig
from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention import backend_choice, check
from mlx_parallm.worker.attention.backend_choice import BackendChoice, choose_backend
from mlx_parallm.worker.attention.base import LayerShape
from mlx_parallm.worker.attention.kernel_backend import KernelAttention
from mlx_parallm.worker.attention.quantisation import KVQuantisation
from mlx_parallm.worker.attention.quantised_reference import QuantisedReferenceAttention
from mlx_parallm.worker.attention.reference import ReferenceAttention
from tests.kernels.shim_language import Shim
from tests.kernels.test_mutations import BIAS_MISTAKES

pytestmark = pytest.mark.slow

DTYPES = (mx.float32, mx.bfloat16)
# Texts of the kernels, and a mistake to put in the place of each.
MISTAKES = {
    "rounds down": ("quantise", ")) * inverse", ")) * inverse - 0.49f"),
    "one level fewer": ("quantise", "(1 << BITS) - 1", "(1 << BITS) - 2"),
    "scales in the wrong place": ("quantise", "* groups + group)", "* groups)"),
    "scales not heeded by attention": ("attend", "value_scales[u].at[0]", "key_scales[0][0].at[0]"),
}


def shape_of(dtype: mx.Dtype) -> LayerShape:
    return LayerShape(num_kv_heads=2, key_dim=128, value_dim=80, dtype=dtype)


def choose(
    shim: Shim,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    *,
    dtype: mx.Dtype = mx.bfloat16,
    block_size: int = 16,
    is_bounded: bool = False,
    has_bias: bool = False,
) -> BackendChoice:
    """Let the device seem to run the kernels."""

    def kernels(
        block_size: int, quantisation: KVQuantisation | None, large_work: float
    ) -> KernelAttention:
        return KernelAttention(block_size, shim, quantisation=quantisation, large_work=large_work)

    monkeypatch.setattr(backend_choice, "_kernels", kernels)
    monkeypatch.setattr(check, "ORDER_ROWS", 1)
    monkeypatch.setattr(check, "ORDER_STEPS", 12)
    cache = CacheConfig(block_size=block_size, kv_cache_dtype=name)
    shapes = [shape_of(dtype)]
    return choose_backend(cache, shapes, 4, is_bounded=is_bounded, has_bias=has_bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "bits"), [("int8", 8), ("int4", 4)])
def test_right_kernels_are_used(
    shim: Shim, monkeypatch: pytest.MonkeyPatch, name: str, bits: int, dtype: mx.Dtype
) -> None:
    choice = choose(shim, monkeypatch, name, dtype=dtype)
    assert choice.rejected is None
    assert isinstance(choice.backend, KernelAttention)
    assert choice.backend.quantisation == KVQuantisation(bits=bits)
    assert choice.backend.unquantised().quantisation is None


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_kernels_are_not(
    shim: Shim, monkeypatch: pytest.MonkeyPatch, name: str, mistake: str, dtype: mx.Dtype
) -> None:
    file, right, wrong = MISTAKES[mistake]

    def mutate(kernel: str, body: str) -> str:
        if file not in kernel:
            return body
        assert right in body
        return body.replace(right, wrong)

    shim.mutate = mutate
    choice = choose(shim, monkeypatch, name, dtype=dtype)
    assert choice.rejected is not None
    assert re.search("off by|read back wrong", choice.rejected)
    assert isinstance(choice.backend, QuantisedReferenceAttention)


@pytest.mark.parametrize("mistake", list(BIAS_MISTAKES)[:4])
def test_kernels_with_a_wrong_bias_are_not_used(
    shim: Shim, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    right, wrong = BIAS_MISTAKES[mistake]
    shim.mutate = lambda _, body: body.replace(right, wrong)
    choice = choose(shim, monkeypatch, "auto", has_bias=True)
    assert "off by" in (choice.rejected or "")
    assert isinstance(choice.backend, ReferenceAttention)


def test_a_wrong_bias_does_not_matter_to_models_without_one(
    shim: Shim, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = BIAS_MISTAKES["no bias"]
    shim.mutate = lambda _, body: body.replace(right, wrong)
    assert choose(shim, monkeypatch, "auto").rejected is None


def test_kernels_with_a_right_bias_are_used(shim: Shim, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(shim, monkeypatch, "auto", has_bias=True).rejected is None


def test_blocks_that_kernels_cannot_quantise_go_to_the_reference(
    shim: Shim, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = choose(shim, monkeypatch, "int8", block_size=6)
    assert "blocks of 6 tokens" in (choice.rejected or "")
    assert isinstance(choice.backend, QuantisedReferenceAttention)


def test_kernels_that_would_write_copies_are_not_used(
    shim: Shim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shim, "bound", lambda array: array + 0)
    choice = choose(shim, monkeypatch, "int8")
    assert "would write a copy of key_pool" in (choice.rejected or "")
    assert isinstance(choice.backend, QuantisedReferenceAttention)


@pytest.mark.parametrize(("is_bounded", "num_small"), [(False, 0), (True, 1)])
def test_within_a_bound_no_chunk_is_left_to_stock_attention(
    shim: Shim, monkeypatch: pytest.MonkeyPatch, is_bounded: bool, num_small: int
) -> None:
    backend = choose(shim, monkeypatch, "auto", is_bounded=is_bounded).backend
    assert isinstance(backend, KernelAttention)
    chunk = ScheduledSequence(
        seq_id=0, slot=0, start=16000, token_ids=(0,) * 2048, block_table=tuple(range(1128))
    )
    assert backend.unquantised().plan([chunk]).num_small == num_small
