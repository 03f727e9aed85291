"""Rows of a batch by their own adapters, against weights that mlx_lm fused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear, LoRASwitchLinear

from mlx_parallm.adapters.weights import LowRank
from mlx_parallm.worker.lora.rows import MANY_ROWS, NO_ADAPTER, AdapterRows
from mlx_parallm.worker.lora.stack import (
    EmbeddingStack,
    ExpertStack,
    LinearStack,
    dora_gain,
    dora_norms,
    expert_slots,
)
from tests.host_tensors import host

IN, OUT, VOCAB, EXPERTS = 24, 16, 40, 5
TOLERANCE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-4}
#: Rank, scale and whether it is a DoRA, by slot.
ADAPTERS = {1: (4, 2.0, False), 2: (16, 0.5, False), 3: (1, 20.0, True), 5: (7, 1.0, True)}


@pytest.fixture(autouse=True)
def _seed() -> None:
    mx.random.seed(3)


def low_rank(trained: Any, kind: Any = "linear") -> LowRank:
    a, b = host(trained.lora_a), host(trained.lora_b)
    if kind != "experts":
        a, b = a.transposed(), b.transposed()
    magnitude = host(trained.m) if isinstance(trained, DoRALinear) else None
    return LowRank(kind=kind, a=a, b=b, scale=trained.scale, magnitude=magnitude)


def trained(cls: Any, base: Any, rank: int, scale: float) -> Any:
    """Return an adapted layer of mlx_lm whose factors are not zero."""
    made = cls.from_base(base, r=rank, scale=scale)
    made.lora_b = mx.random.normal(made.lora_b.shape)
    if cls is DoRALinear:
        made.m = made.m * mx.random.uniform(0.5, 2.0, made.m.shape)
    return made


def gain_of(weight: mx.array, change: LowRank) -> mx.array | None:
    return None if change.magnitude is None else dora_gain(change, dora_norms(weight, change))


def of(slots: list[int]) -> AdapterRows:
    return AdapterRows(mx.array(slots))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("length", [1, 3])
def test_linear_rows_equal_fused_layers(bias: bool, bits: int | None, length: int) -> None:
    inner = 64 if bits else IN
    base = nn.Linear(inner, OUT, bias=bias)
    plain = base.weight
    if bits:
        base = nn.QuantizedLinear.from_linear(base, group_size=32, bits=bits)
        plain = mx.dequantize(base.weight, base.scales, base.biases, group_size=32, bits=bits)
    stack = LinearStack((OUT, inner), mx.float32)
    fused: dict[int, Any] = {NO_ADAPTER: base, 7: base}
    for slot, (rank, scale, is_dora) in ADAPTERS.items():
        layer = trained(DoRALinear if is_dora else LoRALinear, base, rank, scale)
        change = low_rank(layer)
        assert stack.why_unfit(change) is None
        stack.put(slot, change, gain_of(plain, change))
        fused[slot] = layer.fuse(dequantize=True)
    rows = [3, 0, 1, 2, 5, 1, 7]
    x = mx.random.normal((len(rows), length, inner))
    actual = stack(x, base(x), of(rows), base.bias if bias else None)
    wanted = mx.concatenate([fused[slot](x[i : i + 1]) for i, slot in enumerate(rows)])
    assert mx.allclose(actual, wanted, **TOLERANCE)
    # Some models merge these axes before a layer.
    flat, y = x.flatten(0, 1), base(x).flatten(0, 1)
    merged = stack(flat, y, of(rows), base.bias if bias else None)
    assert mx.allclose(merged, wanted.flatten(0, 1), **TOLERANCE)


@pytest.mark.parametrize(
    "few",
    [[], [0], [2, 0, 5], [3] * MANY_ROWS, [3, 0] * MANY_ROWS + [2, 5]],
    ids=["all have one", "and base", "and others", "two", "two, base and others"],
)
@pytest.mark.parametrize("bias", [False, True])
def test_adapters_of_many_rows_are_those_of_each(few: list[int], bias: bool) -> None:
    base = nn.Linear(IN, OUT, bias=bias)
    stack = LinearStack((OUT, IN), mx.float32)
    for slot, (rank, scale, is_dora) in ADAPTERS.items():
        change = low_rank(trained(DoRALinear if is_dora else LoRALinear, base, rank, scale))
        stack.put(slot, change, gain_of(base.weight, change))
    slots = np.array([1] * MANY_ROWS + few, np.int32)
    slots = slots[np.random.default_rng(0).permutation(len(slots))]
    together = AdapterRows.of_step(slots)
    assert together is not None
    assert together.frequent is not None
    x = mx.random.normal((len(slots), 1, IN))
    actual = stack(x, base(x), together, base.bias if bias else None)
    each = stack(x, base(x), AdapterRows(mx.array(slots)), base.bias if bias else None)
    assert mx.allclose(actual, each, **TOLERANCE)
    fewer = AdapterRows.of_step(np.array([1] * (MANY_ROWS - 1) + [0] * MANY_ROWS, np.int32))
    assert fewer is not None
    assert fewer.frequent is None


def test_embedding_rows_and_tied_heads_equal_fused_layers() -> None:
    base = nn.Embedding(VOCAB, IN)
    stack = EmbeddingStack((VOCAB, IN), mx.float32)
    fused: dict[int, Any] = {NO_ADAPTER: base}
    for slot, (rank, scale, _) in ADAPTERS.items():
        embedding = trained(LoRAEmbedding, base, rank, scale)
        stack.put(slot, low_rank(embedding, "embedding"))
        fused[slot] = embedding.fuse()
    rows = [2, 0, 5, 1]
    ids = mx.random.randint(0, VOCAB, (len(rows), 3))
    actual = stack(ids, base(ids), of(rows))
    wanted = mx.stack([fused[slot](ids[i]) for i, slot in enumerate(rows)])
    assert mx.allclose(actual, wanted, **TOLERANCE)
    x = mx.random.normal((len(rows), 3, IN))
    logits = stack.head(x, base.as_linear(x), of(rows))
    wanted = mx.stack([fused[slot].as_linear(x[i]) for i, slot in enumerate(rows)])
    assert mx.allclose(logits, wanted, **TOLERANCE)
    # An adapter of PEFT changes what is looked up only.
    change = replace(
        low_rank(trained(LoRAEmbedding, base, 4, 2.0), "embedding"), changes_head=False
    )
    stack.put(2, change)
    logits = stack.head(x, base.as_linear(x), of(rows))
    assert mx.allclose(logits[0], base.as_linear(x[0]), **TOLERANCE)
    assert mx.allclose(logits[1:], wanted[1:], **TOLERANCE)
    assert not mx.allclose(stack(ids, base(ids), of(rows))[0], base(ids[0]), **TOLERANCE)


def test_experts_equal_those_of_mlx_lm() -> None:
    base = SwitchLinear(IN, OUT, EXPERTS, bias=False)
    stack = ExpertStack((EXPERTS, OUT, IN), mx.float32)
    layers: dict[int, Any] = {NO_ADAPTER: base}
    for slot, (rank, scale, _) in ADAPTERS.items():
        layers[slot] = trained(LoRASwitchLinear, base, rank, scale)
        stack.put(slot, low_rank(layers[slot], "experts"))
    rows = [1, 0, 5, 2, 1]
    x = mx.random.normal((len(rows), 1, 1, 1, IN))
    indices = mx.random.randint(0, EXPERTS, (len(rows), 1, 2))
    both = expert_slots(indices, mx.array(rows), stack.num_slots)
    actual = stack(x, base(x, indices), both, sorted_indices=False)
    wanted = mx.stack([layers[slot](x[i], indices[i]) for i, slot in enumerate(rows)])
    assert mx.allclose(actual, wanted, **TOLERANCE)


def test_a_dropped_slot_is_the_base_and_others_stay() -> None:
    base = nn.Linear(IN, OUT, bias=False)
    stack = LinearStack((OUT, IN), mx.float32)
    for slot, (rank, scale, is_dora) in ADAPTERS.items():
        change = low_rank(trained(DoRALinear if is_dora else LoRALinear, base, rank, scale))
        stack.put(slot, change, gain_of(base.weight, change))
    x = mx.random.normal((3, 1, IN))
    before = stack(x, base(x), of([1, 3, 5]))
    stack.drop(3)
    after = stack(x, base(x), of([1, 3, 5]))
    assert mx.array_equal(after[0], before[0])
    assert mx.allclose(after[1], base(x)[1], **TOLERANCE)
    assert mx.array_equal(after[2], before[2])


def test_a_step_in_flight_keeps_the_arrays_it_has() -> None:
    base = nn.Linear(IN, OUT, bias=False)
    stack = LinearStack((OUT, IN), mx.float32)
    stack.put(1, low_rank(trained(LoRALinear, base, 4, 1.0)))
    x = mx.random.normal((1, 1, IN))
    wanted = stack(x, base(x), of([1]))
    mx.eval(wanted)
    lazy = stack(x, base(x), of([1]))
    stack.put(1, low_rank(trained(LoRALinear, base, 4, 1.0)))
    assert mx.array_equal(lazy, wanted)
    assert not mx.allclose(stack(x, base(x), of([1])), wanted, **TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "a", "b"),
    [
        ("embedding", (4, IN), (OUT, 4)),
        ("linear", (4, IN + 1), (OUT, 4)),
        ("linear", (4, IN), (IN, 4)),
    ],
)
def test_what_does_not_fit_is_told(kind: Any, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    stack = LinearStack((OUT, IN), mx.float32)
    assert stack.why_unfit(LowRank(kind=kind, a=host(mx.zeros(a)), b=host(mx.zeros(b)), scale=1.0))
