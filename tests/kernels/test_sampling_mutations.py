"""Every barrier and shuffle of the sampling kernels is needed: without any one, a check fails."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_parallm.runner.sampling_check import why_not
from mlx_parallm.sampling.kernel_sampling import SamplingKernels
from mlx_parallm.sampling.kernels import TEXTS
from tests.kernels.mutation import SHIMS, SYNCHRONISATION, leave_out, mutants, overlooked
from tests.kernels.shim_compile import require_compiler
from tests.kernels.shim_dialect import ORDERS, Shim

# Both warps have logits of either half.
VOCAB, THREADS = 1040, 64


def is_right(shim: Shim) -> bool:
    """Whether the check at load passes in every order."""
    kernels = SamplingKernels(shim, threads=THREADS)
    for order in ORDERS:
        shim.order = order
        if why_not(kernels, VOCAB, mx.float16) is not None:
            return False
    return True


def test_the_whole_texts_are_right(shim: Shim) -> None:
    assert is_right(shim)


@pytest.mark.parametrize(("language", "text", "nth"), list(mutants(TEXTS)))
def test_nothing_can_be_left_out(language: str, text: str, nth: int) -> None:
    require_compiler()
    shim = SHIMS[language]()
    mutated = leave_out(shim, f"sampling_{text}_", language, nth)
    assert not is_right(shim)
    assert mutated


@pytest.mark.parametrize("language", list(SYNCHRONISATION))
def test_no_synchronisation_is_overlooked(language: str) -> None:
    assert not overlooked(TEXTS, language)


def test_there_is_something_to_leave_out() -> None:
    found = list(mutants(TEXTS))
    for language in SHIMS:
        assert sum(one[0] == language for one in found) == 13


#: Text of the kernels, and what would be a mistake in its place.
MISTAKES = {
    "one more kept": ("draw", "limit = top_k;", "limit = top_k + 1.0f;"),
    "one fewer kept": ("draw", "limit = top_k;", "limit = top_k - 1.0f;"),
    "all that tie count": ("draw", "(limit - above) *", "totals[prefix % DIGITS] *"),
    "top-p of everything": ("draw", "low = prefix;", ""),
    "other noise": ("draw", "i + j + HALF : 0", "i + j + HALF + 1 : 0"),
    "min-p not divided": ("draw", "largest / temperature + log_min_p", "largest + log_min_p"),
    "the last of those that tie": ("logprobs", "at > last_id", "at < last_id"),
    "a sum without its largest": ("logprobs", "norm = largest + ", "norm = "),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_kernel_is_not_used(mistake: str) -> None:
    require_compiler()
    file, right, wrong = MISTAKES[mistake]
    shim = SHIMS["cuda"]()

    def mutate(name: str, body: str) -> str:
        if not name.startswith(f"sampling_{file}_"):
            return body
        assert right in body
        return body.replace(right, wrong)

    shim.mutate = mutate
    assert not is_right(shim)
