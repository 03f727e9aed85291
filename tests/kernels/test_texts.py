"""The two languages' texts are one algorithm: line by line the same but for a few words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mlx_parallm.attention.kernels
from mlx_parallm.attention.kernels.build import kernel_text

FOLDER = Path(mlx_parallm.attention.kernels.__file__).parent
NAMES = sorted(path.stem for path in (FOLDER / "cuda").iterdir())
#: What Metal says, and what CUDA says there.
WORDS = (
    (r"typedef long Place", "typedef long long Place"),
    (r"\bconstant constexpr ", "constexpr "),
    (r"\bthread (?=float|const)", ""),
    (r"\bdevice (?=\w+\*)", ""),
    (r"\bthreadgroup (?=float)", "__shared__ "),
    (r"threadgroup_barrier\(mem_flags::mem_threadgroup\)", "__syncthreads()"),
    (r"simdgroup_barrier\(mem_flags::mem_threadgroup\)", "__syncwarp()"),
    (r"simd_shuffle_xor\(", "__shfl_xor_sync(0xffffffff, "),
    (r"thread_position_in_grid\.x", "blockIdx.x * THREADS + threadIdx.x"),
    (r"threadgroup_position_in_grid\.x", "blockIdx.x"),
    (r"thread_index_in_threadgroup", "threadIdx.x"),
    (r"\bas_type<float>\(", "__uint_as_float("),
    (r"\bas_type<float16_t>\(", "__ushort_as_half("),
    (r"\bbfloat16_t\b", "__nv_bfloat16"),
    (r"\bfloat16_t\b", "__half"),
    (r"\bprecise::tanh\(", "tanhf("),
    (r"\b(exp2|fmax|fmin|rint)\(", r"\1f("),
)
#: MLX passes an attribute or a shape if its name occurs anywhere in a body.
UNWANTED = re.compile(
    r"grid_size|grid_origin|threads_per|simdgroup_index|simdgroups_|in_simdgroup|quadgroup|_strides|_ndim|thread_execution_width"
)


def in_cuda(metal: str) -> str:
    """A Metal text in CUDA's words."""
    for mine, theirs in WORDS:
        metal = re.sub(mine, theirs, metal)
    return metal


@pytest.mark.parametrize("name", NAMES)
def test_lines_are_the_same(name: str) -> None:
    cuda = (FOLDER / "cuda" / f"{name}.cu").read_text().splitlines()
    metal = in_cuda((FOLDER / "metal" / f"{name}.metal").read_text()).splitlines()
    assert metal == cuda


def test_both_languages_have_the_same_texts() -> None:
    assert sorted(path.stem for path in (FOLDER / "metal").iterdir()) == NAMES


@pytest.mark.parametrize(("folder", "suffix"), [("cuda", ".cu"), ("metal", ".metal")])
@pytest.mark.parametrize("name", NAMES)
def test_mlx_finds_no_argument_that_is_not_meant(name: str, folder: str, suffix: str) -> None:
    assert not UNWANTED.search(kernel_text(folder, name + suffix))


@pytest.mark.parametrize(("folder", "suffix"), [("cuda", ".cu"), ("metal", ".metal")])
def test_texts_are_short_as_they_are_hashed_at_every_call(folder: str, suffix: str) -> None:
    common = len(kernel_text(folder, "common" + suffix))
    for name in NAMES:
        assert common + len(kernel_text(folder, name + suffix)) < 10_000
