"""Every barrier and shuffle of the sampling kernels is needed: without it, a check fails."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_parallm.worker.sampling.check import why_not, why_not_greedy
from mlx_parallm.worker.sampling.kernel_sampling import SamplingKernels
from mlx_parallm.worker.sampling.kernels import TEXTS
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

# Both warps have logits of both halves.
VOCAB, THREADS = 1040, 64


def is_right(shim: Shim) -> bool:
    """True if the checks at load pass in every order of threads."""
    kernels = SamplingKernels(shim, threads=THREADS)
    checks = (why_not, why_not_greedy)
    return all(
        passes_in_every_order(shim, lambda check=check: check(kernels, VOCAB, mx.float16))
        for check in checks
    )


def test_the_whole_texts_are_right(shim: Shim) -> None:
    assert is_right(shim)


@pytest.mark.parametrize(("language", "text", "nth"), list(mutants(TEXTS)))
def test_nothing_can_be_left_out(language: str, text: str, nth: int) -> None:
    require_compiler()
    shim = SHIMS[language]()
    mutated = leave_out(shim, f"sampling_{text}_", nth)
    assert not is_right(shim)
    assert mutated


def test_no_synchronisation_is_overlooked() -> None:
    assert not overlooked(TEXTS)


def test_there_is_something_to_leave_out() -> None:
    all_mutants = list(mutants(TEXTS))
    for language in SHIMS:
        assert sum(mutant[0] == language for mutant in all_mutants) == 16


MISTAKES = {
    "one more kept": Mistake("draw", "limit = top_k;", "limit = top_k + 1.0f;"),
    "one fewer kept": Mistake("draw", "limit = top_k;", "limit = top_k - 1.0f;"),
    "all that tie count": Mistake("draw", "(limit - above) *", "totals[prefix % DIGITS] *"),
    "top-p of everything": Mistake("draw", "low = prefix;", ""),
    "other noise": Mistake("draw", "i + j + HALF : 0", "i + j + HALF + 1 : 0"),
    "min-p not divided": Mistake(
        "draw", "largest / temperature + log_min_p", "largest + log_min_p"
    ),
    "the last of equals in a thread": Mistake("greedy", "number <= best", "number < best"),
    "the last of equals in a warp": Mistake("greedy", "their_id < best_id", "their_id > best_id"),
    "the last of equal warps": Mistake("greedy", "warp_id[w] < best_id", "warp_id[w] > best_id"),
    "the piece alone": Mistake("greedy", "i * VEC + j", "i * VEC"),
    "one piece too few": Mistake("greedy", "i < PIECES &&", "i < PIECES - 1 &&"),
    "the last of those that tie": Mistake("logprobs", "at > last_id", "at < last_id"),
    "a sum without its largest": Mistake("logprobs", "norm = largest + ", "norm = "),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_kernel_is_not_used(mistake: str) -> None:
    require_compiler()
    case = MISTAKES[mistake]
    assert not is_right(MistakenShim(TEXTS, f"sampling_{case.file}_", case))
