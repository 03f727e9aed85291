"""Metal kernels as MLX writes them: signatures are as the shim has them, and clang accepts all."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import mlx.core as mx
import pytest

from mlx_parallm.kernels.language import METAL_TUNINGS
from mlx_parallm.worker.attention.kernel_backend import KernelAttention
from mlx_parallm.worker.attention.kernel_pool import why_unsupported
from mlx_parallm.worker.attention.quantisation import KVQuantisation
from mlx_parallm.worker.lora.change_kernels import MAX_LAYERS, ChangeKernels
from mlx_parallm.worker.lora.stack import LinearStack
from mlx_parallm.worker.sampling.kernel_sampling import SamplingKernels
from tests.builders.kernel_cases import Case, Trial
from tests.kernels.metal_check import ATTRIBUTE, complaints, require_clang
from tests.kernels.metal_source import Launch, RecordingMetal, metal_sources
from tests.kernels.shim_language import MetalShim
from tests.kernels.test_texts import TEXTS

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
QUANTISATIONS = (None, KVQuantisation(bits=8), KVQuantisation(bits=4))
DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (192, 128), (8, 8))
HEADS = ((2, 1), (7, 1), (16, 2), (6, 6))
SCORES = ({}, {"soft_cap": 30.0, "sinks": True, "distances": 33})
#: ``STEPS``: one row, whose arrays are small, and rows that are cut beside chunks.
STEPS = (((5, 1),), ((200, 1), (20, 2), (130, 20)))
VOCABULARIES = (151_936, 50_257, 33)
ROWS = (1, 9, 70)
#: ``SAMPLE`` of the cases, and how many variants of these are ``CHECKED``, outside slow tests.
SAMPLE, CHECKED = 12, 60


def launches_of(cases: Iterable[Case]) -> list[Launch]:
    """Return a launch of every variant that the cases, sampling and adapters take."""
    language = RecordingMetal()
    for case in cases:
        for tuning in METAL_TUNINGS if case.dtype == mx.bfloat16 else METAL_TUNINGS[:1]:
            backend = KernelAttention(
                case.block_size, language, quantisation=case.quantisation, tuning=tuning
            )
            if why_unsupported(backend.layout(case.shape)) is None:
                _attend(backend, case)
    _sample(SamplingKernels(language))
    _change(ChangeKernels(language))
    return language.launches


def all_cases() -> Iterator[Case]:
    """Yield layers of every dtype, KV format, head size, grouping and kind of scores."""
    for dtype, scheme, dims, heads, scores, step in itertools.product(
        DTYPES, QUANTISATIONS, DIMS, HEADS, SCORES, STEPS
    ):
        yield Case(
            sequences=step,
            heads=heads[0],
            kv_heads=heads[1],
            key_dim=dims[0],
            value_dim=dims[1],
            dtype=dtype,
            quantisation=scheme,
            **scores,
        )


def _attend(backend: KernelAttention, case: Case) -> None:
    trial = Trial(case)
    pool = trial.fill(backend)
    trial.run(backend, pool)
    for count in (1, 9):
        ids = mx.arange(count, dtype=mx.int32)
        backend.copy_blocks(pool, ids, ids + count)
        backend.put_blocks(pool, ids, backend.take_blocks(pool, ids))
        backend.gather(pool, ids[None])


def _sample(kernels: SamplingKernels) -> None:
    for dtype, vocab, rows in itertools.product(DTYPES, VOCABULARIES, ROWS):
        logits = mx.zeros((rows, vocab), dtype)
        kernels.draw(logits, mx.zeros((rows, 4)), mx.zeros((rows, 2), mx.uint32))
        kernels.logprobs(logits, mx.zeros(rows, mx.uint32), mx.zeros((rows, 2), mx.int32), 5)


def _change(kernels: ChangeKernels) -> None:
    for dtype, layers, rows in itertools.product(DTYPES, range(1, MAX_LAYERS + 1), ROWS):
        x, y = mx.zeros((rows, 1, 64), dtype), mx.zeros((rows, 1, 32), dtype)
        stack = LinearStack((32, 64), dtype)
        kernels(x, [y] * layers, [stack] * layers, mx.zeros(rows, mx.int32))


def check(chosen: Sequence[Launch]) -> None:
    """Check the signatures and the texts of some launches."""
    require_clang()
    sources = metal_sources(chosen)
    for launch, source in zip(chosen, sources, strict=True):
        assert declared(source) == replica(launch), launch
    assert complaints(sources) == []


def declared(source: str) -> list[str]:
    """Return the parameters that MLX declares."""
    (signature,) = re.findall(r"\[\[kernel\]\] void \w+\((.*?)\) {", source, re.DOTALL)
    return [ATTRIBUTE.sub("", line).strip() for line in signature.split(",\n")]


def replica(launch: Launch) -> list[str]:
    """Return the parameters of the shim."""
    inputs = [mx.zeros(shape, dtype) for shape, dtype in launch.inputs]
    dtypes = [dtype for _, dtype in launch.outputs]
    return [parameter for parameter, _ in MetalShim().signature(launch.text, inputs, dtypes)]


@pytest.fixture(scope="module")
def some_launches() -> list[Launch]:
    """Return the variants of a sample of the cases."""
    return launches_of(random.Random(0).sample(list(all_cases()), SAMPLE))


def test_every_text_is_checked(some_launches: list[Launch]) -> None:
    names = {launch.text.name.rpartition("_")[0] for launch in some_launches}
    # Heads are made, and the largest logit is found, by a kernel on CUDA alone.
    texts = {path.stem for path in TEXTS} - {"common", "heads", "greedy"}
    assert {name.partition("_")[2] for name in names} == texts


def test_some_variants_are_right(some_launches: list[Launch]) -> None:
    check(random.Random(0).sample(some_launches, CHECKED))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("device Piece*", "constant Piece*"),
        ("threadgroup float", "device float"),
        ("thread float (&", "float (&"),
        ("constant constexpr", "constexpr"),
        ("as_type<float>(", "as_type<double>("),
        ("const float ", "const double "),
        ("threadgroup float warp_sums[WARPS]", "threadgroup float warp_sums[WARPS * 99]"),
        ("bfloat16_t", "__nv_bfloat16"),
        ("simd_shuffle_xor", "__shfl_xor_sync"),
        ("T(", "T "),
    ],
)
def test_a_planted_mistake_shows(some_launches: list[Launch], right: str, wrong: str) -> None:
    require_clang()
    sources = [source for source in metal_sources(some_launches) if right in source]
    assert complaints([sources[0].replace(right, wrong)])


def test_a_planted_mistake_in_a_signature_shows(some_launches: list[Launch]) -> None:
    launch = next(launch for launch in some_launches if "copy" in launch.text.name)
    (source,) = metal_sources([launch])
    assert declared(source) == replica(launch)
    shapes = [((100,), dtype) for _, dtype in launch.inputs]
    other = metal_sources([replace(launch, inputs=tuple(shapes))])
    assert declared(*other) != replica(launch)


@pytest.mark.slow
def test_all_variants_are_right() -> None:
    launches = launches_of(all_cases())
    assert len(launches) > 2_400
    check(launches)
