"""The kernel texts, run on the CPU, agree with softmax attention at many shapes."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.kernels.language import Tuning
from mlx_parallm.worker.attention import check as check_at_start
from mlx_parallm.worker.attention.check import (
    HEADS,
    ORDER_LENGTH,
    ORDER_POOLS,
    SHAPE,
    OrderTrial,
    attention_error,
)
from mlx_parallm.worker.attention.kernel_backend import KernelAttention
from mlx_parallm.worker.attention.quantisation import KVQuantisation
from mlx_parallm.worker.attention.reference import ReferenceAttention
from tests.builders.kernel_cases import Case, Trial
from tests.kernels.shim_language import ORDERS, Shim

pytestmark = pytest.mark.slow

#: ``SHORT`` has decode rows and a few tokens of one sequence.
SHORT = ((37, 1), (3, 1), (15, 3), (0, 1))
#: ``LONG``: rows are cut into items; long chunks between rows and short ones use stock attention.
LONG = ((200, 1), (20, 2), (130, 20), (33, 1), (0, 17))
BITS8, BITS4 = KVQuantisation(bits=8), KVQuantisation(bits=4, group_size=32)
BF16, FP16 = mx.bfloat16, mx.float16
CASES = [
    *(Case(key_dim=dim, dtype=BF16, sequences=SHORT) for dim in (64, 80, 96, 112, 128, 192, 256)),
    Case(key_dim=192, value_dim=128, sequences=SHORT, sinks=True),
    Case(key_dim=64, value_dim=256, dtype=FP16, sequences=SHORT),
    *(Case(heads=h, kv_heads=k, sequences=SHORT) for h, k in ((2, 2), (7, 1), (12, 1), (36, 2))),
    *(Case(block_size=size, key_dim=128, sequences=SHORT) for size in (1, 6, 48)),
    Case(sequences=((5, 1),), heads=1, kv_heads=1, sinks=True),  # arrays that Metal has constant
    Case(sequences=SHORT, window=5),
    Case(sequences=SHORT, soft_cap=2.0, sinks=True, dtype=FP16, key_dim=128),
    Case(sequences=LONG, key_dim=128, dtype=BF16),
    Case(sequences=LONG, window=70, sinks=True, soft_cap=2.0),
    Case(sequences=LONG, sinks=True, heads=3, kv_heads=3),
    Case(sequences=((300, 1), (0, 1)), window=299, key_dim=80),
    Case(sequences=LONG, quantisation=BITS8, dtype=BF16, key_dim=128),
    Case(sequences=LONG, quantisation=BITS4, key_dim=80, value_dim=112, dtype=FP16),
    Case(sequences=SHORT, quantisation=KVQuantisation(bits=8, group_size=32), heads=9, kv_heads=1),
    Case(sequences=SHORT, quantisation=KVQuantisation(bits=4, scale_dtype=mx.float32), sinks=True),
    Case(sequences=SHORT, distances=129),
    Case(sequences=SHORT, distances=1, heads=7, kv_heads=1, sinks=True, dtype=FP16),
    Case(sequences=((5, 1),), distances=2, heads=1, kv_heads=1),  # Metal has these constant
    Case(sequences=LONG, distances=33, key_dim=128, dtype=BF16, heads=4, kv_heads=4),
    Case(sequences=LONG, distances=129, window=70, sinks=True, soft_cap=2.0),
    Case(sequences=LONG, distances=5, quantisation=BITS8, dtype=BF16, heads=9, kv_heads=1),
    Case(sequences=LONG, distances=300, quantisation=BITS4, key_dim=128, heads=36, kv_heads=2),
]
TUNINGS = [
    Tuning(threadgroups=16, warps=1, tile=8),
    Tuning(threadgroups=64, warps=8, score_lanes=8, max_heads=1),
    Tuning(threadgroups=1, warps=2, tile=4, score_lanes=16),
]


def check(shim: Shim, case: Case, tuning: Tuning | None = None) -> None:
    """Check a case in every order in which threads may run."""
    trial = Trial(case)
    backend = KernelAttention(case.block_size, shim, quantisation=case.quantisation, tuning=tuning)
    for order in ORDERS:
        shim.order = order
        error = trial.error(trial.run(backend, trial.fill(backend, poison=True)))
        assert error <= case.tolerance


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_right(shim: Shim, case: Case) -> None:
    check(shim, case)


@pytest.mark.parametrize(
    ("tuning", "quantisation"), list(zip(TUNINGS, (None, BITS8, None), strict=True)), ids=str
)
def test_tuning_changes_nothing(
    shim: Shim, tuning: Tuning, quantisation: KVQuantisation | None
) -> None:
    check(shim, Case(sequences=LONG, key_dim=128, quantisation=quantisation, sinks=True), tuning)


def test_the_check_at_start_passes(shim: Shim) -> None:
    assert attention_error(KernelAttention(16, shim)) < 1e-5


def test_the_trial_of_order_at_start_attends_as_the_reference_does(
    shim: Shim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_at_start, "ORDER_STEPS", 2 * ORDER_POOLS * ORDER_LENGTH)
    backends = KernelAttention(16, shim), ReferenceAttention(16)
    ours, stock = (
        OrderTrial(backend, SHAPE, HEADS, 16, rows=2).outputs(waits=False) for backend in backends
    )
    assert np.abs(ours - stock).max() < 1e-5
