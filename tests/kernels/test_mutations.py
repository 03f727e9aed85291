"""Every barrier and shuffle of the kernel texts is needed: without it, a check fails."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_parallm.kernels.kernel import kernel_text
from mlx_parallm.worker.attention.kernels import TEXTS
from mlx_parallm.worker.attention.quantisation import KVQuantisation
from tests.builders.kernel_cases import Case
from tests.kernels.attention_trial import is_right
from tests.kernels.heads_trial import HeadCase, heads_are_right
from tests.kernels.mutation import SHIMS, leave_out, mutants, overlooked
from tests.kernels.shim_compile import require_compiler
from tests.kernels.shim_language import CudaShim, MetalShim, Shim

pytestmark = pytest.mark.slow

#: The cases have several heads, keys per warp, warps, and items per row.
PLAIN = Case(sequences=((90, 1), (300, 1), (2, 1)), key_dim=64)
QUANTISED = Case(sequences=((20, 3),), quantisation=KVQuantisation(bits=8, group_size=32))

#: ``BIASED`` has rows whose keys are cut, several heads of a KV head, and far keys.
BIASED = Case(sequences=((90, 1), (300, 1), (2, 1)), key_dim=64, distances=40)
#: ``BIAS_MISTAKES``: a part of the text, and a mistake in its place.
BIAS_MISTAKES = {
    "without a clamp": ("min(distance, bias_shape[1] - 1)", "distance % bias_shape[1]"),
    "no bias": ("score[u][g] += bias[", "score[u][g] += 0.0f * bias["),
    "of another head": ("(head + g) % HEADS", "(head + g + 1) % HEADS"),
    "of the next distance": ("fields[4] - tile", "fields[4] + 1 - tile"),
    "of the first head of a part": ("(head + g) % HEADS", "head"),
    "from the end of an item": ("fields[4] - tile", "end - 1 - tile"),
    "in another unit": ("bias_shape[1] - 1)] * LOG2_E", "bias_shape[1] - 1)]"),
}


@pytest.mark.parametrize("case", [PLAIN, QUANTISED, BIASED], ids=str)
def test_the_whole_texts_are_right(shim: Shim, case: Case) -> None:
    assert is_right(shim, case)


@pytest.mark.parametrize(("language", "text", "nth"), list(mutants(TEXTS)))
def test_nothing_can_be_left_out(language: str, text: str, nth: int) -> None:
    require_compiler()
    shim = SHIMS[language]()
    mutated = leave_out(shim, f"paged_{text}_", nth)
    if text == "heads":
        assert not heads_are_right(shim, HeadCase())
    else:
        assert not is_right(shim, QUANTISED if text == "quantise" else PLAIN)
    assert mutated


@pytest.mark.parametrize("mistake", BIAS_MISTAKES)
def test_a_wrong_bias_shows(shim: Shim, mistake: str) -> None:
    right, wrong = BIAS_MISTAKES[mistake]

    def mutate(_: str, body: str) -> str:
        return body.replace(right, wrong)

    assert right in kernel_text(TEXTS / "attend.metal")
    shim.mutate = mutate
    assert not is_right(shim, BIASED)


def test_no_synchronisation_is_overlooked() -> None:
    assert not overlooked(TEXTS)


def test_there_is_something_to_leave_out() -> None:
    all_mutants = list(mutants(TEXTS))
    for language in SHIMS:
        assert sum(mutant[0] == language for mutant in all_mutants) == 12


def test_a_barrier_of_the_wrong_memory_shows() -> None:
    require_compiler()
    shim = MetalShim()
    shim.mutate = lambda _, body: body.replace("mem_threadgroup", "mem_device")
    assert not is_right(shim, PLAIN)


def test_a_barrier_that_some_threads_skip_shows() -> None:
    require_compiler()
    shim = CudaShim()
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    shim.mutate = lambda _, body: body.replace(barrier, f"if (lane) {barrier}")
    assert not is_right(shim, PLAIN)


def test_trips_that_differ_within_a_warp_show() -> None:
    require_compiler()
    shim = CudaShim()
    shim.mutate = lambda _, body: body.replace("tile < end;", "tile + score_key < end;")
    assert not is_right(shim, Case(sequences=((16, 1),), dtype=mx.float32))
