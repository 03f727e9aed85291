"""The texts of the two languages are one algorithm: equal line by line but for a few words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mlx_parallm
from mlx_parallm.kernels.build import kernel_text

PACKAGE = Path(mlx_parallm.__file__).parent
FOLDERS = tuple(PACKAGE / "worker" / name / "kernels" for name in ("attention", "sampling", "lora"))
TEXTS = sorted(path for folder in FOLDERS for path in (folder / "cuda").iterdir())
#: Metal's words, and CUDA's words for the same.
WORDS = (
    (r"typedef long Place", "typedef long long Place"),
    (r"\bconstant constexpr ", "constexpr "),
    (r"\bthread (?=float|const|Chunk)", ""),
    (r"\bdevice (?=\w+(<.*>)?\*)", ""),
    (r"\bthreadgroup (?=float|unsigned|int)", "__shared__ "),
    (r"threadgroup_barrier\(mem_flags::mem_threadgroup\)", "__syncthreads()"),
    (r"simdgroup_barrier\(mem_flags::mem_threadgroup\)", "__syncwarp()"),
    (r"simd_shuffle_xor\(", "__shfl_xor_sync(0xffffffff, "),
    (r"thread_position_in_grid\.x", "blockIdx.x * THREADS + threadIdx.x"),
    (r"threadgroup_position_in_grid\.x", "blockIdx.x"),
    (r"thread_index_in_threadgroup", "threadIdx.x"),
    (r"\bas_type<float>\(", "__uint_as_float("),
    (
        r"0x4b000000u \| \(bytes >> (.+) \* 8 & 0xff\)",
        r"__byte_perm(bytes, 0x4b000000u, 0x7440 + \1)",
    ),
    (r"\bas_type<unsigned>\(", "__float_as_uint("),
    (r"\bas_type<float16_t>\(", "__ushort_as_half("),
    (r"\bbfloat16_t\b", "__nv_bfloat16"),
    (r"\bfloat16_t\b", "__half"),
    (r"\bprecise::(tanh|log)\(", r"\1f("),
    (r"\b(exp2|fmax|fmin|rint)\(", r"\1f("),
)
#: MLX passes an attribute or a shape if its name occurs anywhere in a body.
UNWANTED = re.compile(
    r"grid_size|grid_origin|threads_per|simdgroup_index|simdgroups_|in_simdgroup|quadgroup|(?<!y[0-2])(?<!slots)_strides|_ndim|thread_execution_width"
)


def in_cuda(metal: str) -> str:
    """Return a Metal text in CUDA's words."""
    for mine, theirs in WORDS:
        metal = re.sub(mine, theirs, metal)
    return metal


def in_metal(path: Path) -> Path:
    """Return the Metal text of a CUDA text."""
    return path.parents[1] / "metal" / f"{path.stem}.metal"


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_lines_are_the_same(path: Path) -> None:
    metal = in_cuda(in_metal(path).read_text()).splitlines()
    assert metal == path.read_text().splitlines()


def test_both_languages_have_the_same_texts() -> None:
    paths = sorted(path for folder in FOLDERS for path in (folder / "metal").iterdir())
    assert paths == [in_metal(path) for path in TEXTS]


@pytest.mark.parametrize("path", [*TEXTS, *map(in_metal, TEXTS)], ids=lambda path: path.name)
def test_mlx_finds_no_argument_that_is_not_meant(path: Path) -> None:
    assert not UNWANTED.search(kernel_text(path))


@pytest.mark.parametrize("path", [*TEXTS, *map(in_metal, TEXTS)], ids=lambda path: path.name)
def test_texts_are_short_as_they_are_hashed_at_every_call(path: Path) -> None:
    common = path.with_stem("common")
    assert len(kernel_text(common)) + len(kernel_text(path)) < 10_000
