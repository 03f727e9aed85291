"""Command buffers of a decode step on Metal: the step's own operations, counted by MLX's rule."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map

from mlx_parallm.kernels.language import MetalLanguage
from mlx_parallm.process_setup.device_process import OPS_PER_BUFFER, mb_per_buffer
from mlx_parallm.types.request import SamplingParams
from mlx_parallm.types.step import SampleSpec, ScheduledSequence
from mlx_parallm.worker.attention.base import LayerShape
from mlx_parallm.worker.attention.kernel_attend import AttendKernels
from mlx_parallm.worker.attention.kernel_backend import MetalAttention
from mlx_parallm.worker.attention.quantisation import quantisation_of
from mlx_parallm.worker.generation.cache_layout import KVLayout
from mlx_parallm.worker.generation.paged_cache import KVPools
from mlx_parallm.worker.generation.paths.packed import PackedPath
from mlx_parallm.worker.generation.row_selection import RowSelector
from mlx_parallm.worker.sampling.kernel_sampling import SamplingKernels
from mlx_parallm.worker.sampling.sampler import Sampler
from tests.builders.random_models import SHAPES, stock_model
from tests.kernels.command_buffers import (
    DEFAULTS,
    Limits,
    Operation,
    command_buffers,
    most_bytes_under_way,
    operations_of,
)

#: ``NUM_BLOCKS`` is a number that no other array has as its first dimension.
NUM_BLOCKS, BLOCK_SIZE = 7, 16
#: ``END``: tokens of a sequence after the step, so many that few rows are split among threadgroups.
END = 8192
KV_GB = (0.25, 1.0, 3.0, 8.0, 64.0)
MOST_BUFFERS = 6
#: ``MACS``: the least memory of a Mac, in GiB, that holds a model in so many bits.
MACS = {("0.6B", 4): 8, ("0.6B", 8): 8, ("8B", 4): 16, ("8B", 8): 24}


@dataclass(frozen=True)
class Measured:
    """The operations of a step, where the pools of all layers have ``kv_bytes``."""

    operations: Sequence[Operation]
    kv_bytes: int

    def with_kv(self, gb: float) -> list[Operation]:
        """Return the operations where pools have ``gb`` GB: kernels may bind whole pools."""
        factor = gb * 2**30 / self.kv_bytes
        return [replace(each, bound=_scaled(each, factor)) for each in self.operations]


def _scaled(operation: Operation, factor: float) -> dict[str, int]:
    return {
        name: round(size * factor) if operation.shapes.get(name, (0,))[0] == NUM_BLOCKS else size
        for name, size in operation.bound.items()
    }


@functools.cache
def measured(shape: str, bits: int, kv: str, lengths: tuple[int, ...]) -> Measured:
    """Return the operations of a step of sequences with so many new tokens."""
    config = SHAPES[shape]
    layer = LayerShape(
        num_kv_heads=config["num_key_value_heads"],
        key_dim=config["head_dim"],
        value_dim=config["head_dim"],
        dtype=mx.bfloat16,
    )
    num_layers = config["num_hidden_layers"]
    backend = MetalAttention(BLOCK_SIZE, quantisation_of(kv))
    pools = KVPools(backend, [layer] * num_layers, NUM_BLOCKS)
    layouts = (KVLayout(layer, None),) * num_layers
    path = PackedPath(hollow_model(shape, bits), layouts, pools, backend, RowSelector())
    kernels = SamplingKernels(MetalLanguage())
    kernels.trust(config["vocab_size"], mx.bfloat16)
    sampler = Sampler(kernels)
    sequences = [
        ScheduledSequence(
            seq_id=row,
            slot=row,
            start=END - length,
            token_ids=(1,) * length,
            # Entries repeat: nothing is computed.
            block_table=tuple(block % NUM_BLOCKS for block in range(END // BLOCK_SIZE)),
        )
        for row, length in enumerate(lengths)
    ]
    ends = (np.cumsum(lengths) - 1).tolist()
    params = SamplingParams(temperature=0.7, top_p=0.9)
    specs = [
        SampleSpec(params=params, seed=row, position=END, prompt_ids=(), output_ids=())
        for row in range(len(lengths))
    ]

    def step(token_ids: mx.array) -> list[mx.array]:
        logits = path.logits(sequences, token_ids, ends)
        return [sampler.choose(logits, specs), *path.arrays()]

    operations = operations_of(step, mx.zeros((sum(lengths),), mx.int32))
    kv_bytes = num_layers * NUM_BLOCKS * BLOCK_SIZE * backend.bytes_per_token(layer)
    return Measured(operations, kv_bytes)


def hollow_model(shape: str, bits: int) -> Any:
    """Return a model whose weights have the shapes of a quantised one, and take no memory."""
    model = stock_model(SHAPES[shape])
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=64, bits=bits)

    def hollow(array: mx.array) -> mx.array:
        return mx.broadcast_to(mx.zeros((), array.dtype), array.shape)

    model.update(tree_map(hollow, model.parameters()))
    mx.eval(model.parameters())
    return model


@pytest.fixture(autouse=True)
def _kernels_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels can be exported here, and nothing else."""
    monkeypatch.setattr(AttendKernels, "prepare", lambda *_: None)


def limits_of(memory_gb: float) -> Limits:
    return Limits(OPS_PER_BUFFER, mb_per_buffer(int(memory_gb * 2**30)))


def num_buffers(operations: Sequence[Operation], limits: Limits) -> int:
    return len(list(command_buffers(operations, limits)))


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("kv", ["auto", "int8"])
@pytest.mark.parametrize(("shape", "bits"), MACS)
def test_a_decode_step_takes_few(shape: str, bits: int, kv: str, rows: int) -> None:
    step = measured(shape, bits, kv, (1,) * rows)
    for memory_gb in (MACS[shape, bits], 64):
        limits = limits_of(memory_gb)
        counts = {gb: num_buffers(step.with_kv(gb), limits) for gb in KV_GB}
        assert max(counts.values()) <= MOST_BUFFERS, (memory_gb, counts)


@pytest.mark.parametrize("shape", ["0.6B", "8B"])
def test_neither_views_nor_limits_suffice_alone(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = measured(shape, 4, "auto", (1,))
    assert num_buffers(step.with_kv(0.25), DEFAULTS) > 2 * MOST_BUFFERS
    monkeypatch.setattr(MetalLanguage, "bound", lambda _, array: array)
    whole = measured.__wrapped__(shape, 4, "auto", (1,))
    assert num_buffers(whole.with_kv(8.0), limits_of(64)) > MOST_BUFFERS
    # Then each of a layer's writes and reads of its pool ends a command buffer.
    num_layers = SHAPES[shape]["num_hidden_layers"]
    assert num_buffers(whole.with_kv(8.0), DEFAULTS) >= 2 * num_layers


@pytest.mark.parametrize("memory_gb", [16, 24, 64])
@pytest.mark.parametrize("num_tokens", [1024, 8192])
def test_the_activations_of_a_prompt_are_bounded(num_tokens: int, memory_gb: int) -> None:
    step = measured("8B", 4, "auto", (num_tokens,))
    most = most_bytes_under_way(step.operations, limits_of(memory_gb))
    assert most < min(0.4 * memory_gb * 2**30, 10e9)


def test_larger_limits_would_not_bound_them() -> None:
    step = measured("8B", 4, "auto", (8192,))
    assert most_bytes_under_way(step.operations, Limits(1000, 4000)) > 38e9
