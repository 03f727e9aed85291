"""Stock operations agree with softmax attention on the shapes that the kernels are tried on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm.worker.attention import decode_groups, dense
from mlx_parallm.worker.attention.quantisation import KVQuantisation
from mlx_parallm.worker.attention.quantised_reference import QuantisedReferenceAttention
from mlx_parallm.worker.attention.reference import ReferenceAttention
from tests.builders.kernel_cases import Case, Trial

MIXED = ((37, 1), (3, 1), (15, 3), (0, 1), (130, 80), (0, 17))
BITS8, BITS4 = KVQuantisation(bits=8), KVQuantisation(bits=4, group_size=32)
CASES = [
    Case(sequences=MIXED),
    Case(sequences=MIXED, window=20, sinks=True),
    Case(sequences=MIXED, soft_cap=2.0),
    Case(sequences=MIXED, soft_cap=0.5, window=20, sinks=True, heads=6, kv_heads=3),
    Case(sequences=MIXED, soft_cap=2.0, dtype=mx.float16, key_dim=80, value_dim=48),
    Case(sequences=MIXED, quantisation=BITS8, sinks=True),
    Case(sequences=MIXED, quantisation=BITS4, key_dim=80, value_dim=112, window=20),
    Case(sequences=MIXED, quantisation=BITS8, soft_cap=2.0, key_dim=24, dtype=mx.float16),
    Case(sequences=MIXED, distances=129),
    Case(sequences=MIXED, distances=1),
    Case(sequences=MIXED, distances=5, heads=6, kv_heads=3, window=20, sinks=True),
    Case(sequences=MIXED, distances=5, dtype=mx.bfloat16, key_dim=128, heads=4, kv_heads=4),
    Case(sequences=MIXED, distances=33, dtype=mx.float16, sinks=True),
    Case(sequences=MIXED, distances=33, soft_cap=0.5, window=20),
    Case(sequences=MIXED, distances=33, quantisation=BITS8, dtype=mx.bfloat16),
    Case(sequences=MIXED, distances=400, quantisation=BITS4, sinks=True),
]


def reference(case: Case) -> ReferenceAttention:
    if case.quantisation is None:
        return ReferenceAttention(case.block_size)
    return QuantisedReferenceAttention(case.block_size, case.quantisation)


@pytest.mark.parametrize("composed", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_right(case: Case, composed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "is_exp_slow", lambda: composed)
    trial, backend = Trial(case), reference(case)
    assert trial.error(trial.run(backend, trial.fill(backend))) <= case.tolerance


def test_a_forgotten_cap_shows() -> None:
    case = Case(sequences=MIXED, soft_cap=2.0)
    trial, backend = Trial(case), ReferenceAttention(case.block_size)
    pool = trial.fill(backend)
    outputs = trial.run(backend, pool)
    trial.case = replace(case, soft_cap=None)
    assert trial.error(outputs) > 0.1


def without_bias(bias: mx.array) -> mx.array:
    return bias * 0


def of_the_next_distance(bias: mx.array) -> mx.array:
    return mx.roll(bias, 1, 1)


def of_another_head(bias: mx.array) -> mx.array:
    return mx.roll(bias, 1, 0)


def without_clamp(bias: mx.array) -> mx.array:
    return mx.pad(bias, [(0, 0), (0, 300)])


@pytest.mark.parametrize(
    "mistake", [without_bias, of_the_next_distance, of_another_head, without_clamp]
)
def test_a_wrong_bias_shows(mistake: Callable[[mx.array], mx.array]) -> None:
    case = Case(sequences=MIXED, distances=33)
    trial, backend = Trial(case), ReferenceAttention(case.block_size)
    outputs = trial.run(backend, trial.fill(backend))
    assert trial.error(outputs) <= case.tolerance
    assert trial.bias is not None
    trial.bias = mistake(trial.bias)
    assert trial.error(outputs) > 0.1


def test_each_layer_has_its_own_bias() -> None:
    """UMT5 has one per layer; a plan keeps only what belongs to the array that it is given."""
    case = Case(sequences=MIXED, distances=33)
    trial, backend = Trial(case), ReferenceAttention(case.block_size)
    pool = trial.fill(backend)
    sequences = [(i, start, count) for i, (start, count) in enumerate(case.sequences)]
    plan = trial._write(backend, pool, sequences)
    for seed in range(3):
        trial.bias = mx.random.normal((case.heads, 33), key=mx.random.key(seed))
        assert trial.error(trial.attend(backend, pool, plan)) <= case.tolerance
    trial.bias = None
    trial.case = replace(case, distances=None)
    assert trial.error(trial.attend(backend, pool, plan)) <= case.tolerance


@pytest.mark.parametrize("scores", [{"soft_cap": 0.5}, {"distances": 20}], ids=str)
def test_rows_of_one_prefix_are_right(
    monkeypatch: pytest.MonkeyPatch, scores: dict[str, Any]
) -> None:
    monkeypatch.setattr(dense, "is_exp_slow", lambda: True)
    monkeypatch.setattr(decode_groups, "MIN_SAVED_TOKENS", 16)
    case = Case(sequences=((40, 1), (40, 1)), **scores)
    trial, backend = Trial(case), ReferenceAttention(case.block_size)
    # The second sequence is the first.
    trial.tables[1], trial.keys[1], trial.values[1] = (
        (*trial.tables[0][:2], trial.tables[1][2]),
        trial.keys[0],
        trial.values[0],
    )
    assert trial.error(trial.run(backend, trial.fill(backend))) <= case.tolerance
