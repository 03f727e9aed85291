"""A case of paged attention on a shim."""

from __future__ import annotations

from mlx_parallm.worker.attention.chunk_plan import LARGE_WORK
from mlx_parallm.worker.attention.kernel_backend import KernelAttention
from tests.builders.kernel_cases import Case, Trial
from tests.kernels.shim_language import ORDERS, KernelError, Shim


def is_right(shim: Shim, case: Case, large_work: float = LARGE_WORK) -> bool:
    """True if the case passes in every order of threads."""
    quantisation = case.quantisation
    backend = KernelAttention(
        case.block_size, shim, quantisation=quantisation, large_work=large_work
    )
    trial = Trial(case)
    for order in ORDERS:
        shim.order = order
        try:
            error = trial.error(trial.run(backend, trial.fill(backend, poison=True)))
        except KernelError:
            return False
        if not error <= case.tolerance:
            return False
    return True
