"""The kernel texts say nothing that MLX or a reader of Metal would misunderstand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mlx_parallm
from mlx_parallm.kernels.kernel import kernel_text
from mlx_parallm.kernels.language import METAL_WORDS

PACKAGE = Path(mlx_parallm.__file__).parent
TEXTS = sorted(PACKAGE.glob("worker/*/kernels/*.metal"))
#: MLX passes an attribute or a shape if its name occurs anywhere in a body.
UNWANTED = re.compile(
    r"grid_size|grid_origin|threads_per|simdgroup_index|simdgroups_|in_simdgroup|quadgroup|(?<!y[0-2])(?<!slots)_strides|_ndim|thread_execution_width"
)
#: Words of CUDA that Metal does not know; those behind ``__CUDA_ARCH__`` are left out.
CUDA_ONLY = re.compile(r"\b(__\w+|threadIdx|blockIdx|blockDim)\b")
#: A pointer or reference is written ``Type* name``, ``(Type*)``, ``Type& name`` or ``(&name)``.
POINTEE = re.compile(
    r"(?:(?<![\w ])|(\w+) )(?:const )?\w+(?:<[^<>]*>)?(?:[*&](?= \w|\))| \(&\w+\))"
)
ADDRESS_SPACES = {"device", "constant", "threadgroup", "thread"}
FOR_CUDA = re.compile(r"#ifdef __CUDA_ARCH__\n.*?#else\n(.*?)#endif\n", re.DOTALL)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_mlx_finds_no_argument_that_is_not_meant(path: Path) -> None:
    assert not UNWANTED.search(kernel_text(path))


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_metal_knows_all_words(path: Path) -> None:
    assert not CUDA_ONLY.search(FOR_CUDA.sub(r"\1", kernel_text(path)))


def unqualified(text: str) -> list[str]:
    """Return the pointers and references of a text that do not name their address space."""
    return [match[0] for match in POINTEE.finditer(text) if match[1] not in ADDRESS_SPACES]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_pointers_name_their_address_space(path: Path) -> None:
    assert unqualified(kernel_text(path)) == []


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_texts_are_short_as_they_are_hashed_at_every_call(path: Path) -> None:
    common = path.with_stem("common")
    assert len(kernel_text(common)) + len(kernel_text(path)) < 10_400


def test_words_of_cuda_are_few() -> None:
    assert len(kernel_text(METAL_WORDS)) < 1_200


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("const device Piece*)(x + 1)", "const Piece*)(x + 1)"),
        ("const device Chunk<S, N>*)", "const Chunk<S, N>*)"),
        ("thread const Chunk<M, 2>& scale", "const Chunk<M, 2>& scale"),
        ("(thread float (&to)[N]", "(float (&to)[N]"),
        (", const device S* from", ", const S* from"),
    ],
)
def test_a_pointer_to_anywhere_shows(right: str, wrong: str) -> None:
    assert unqualified(right) == []
    assert unqualified("int x = " + wrong) != []


#: Words of Metal, and names in the header that MLX puts before every Metal kernel (its ``utils.h``
#: and ``bf16.h``), which a text must not declare.
RESERVED = re.compile(
    r"\b(vertex|fragment|visible|intersection|half|sampler|texture|atomic|ceildiv|elem_to_loc\w*"
    r"|log1p|Limits|shuffle_\w+|simd_shuffle_\w+_impl|metal|limits|complex64_t)\b(?! *<)"
)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_names_are_not_those_of_metal_or_mlx(path: Path) -> None:
    assert not RESERVED.search(kernel_text(path))
