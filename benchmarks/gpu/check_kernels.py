"""Paged attention kernels on this GPU: are they right, and how fast.

    python -m benchmarks.gpu.check_kernels [--only-errors | --only-packed | --only-times] [--tune]

Each case prints the kernels' error and the reference backend's, both against softmax attention in
float64 and per unit of the largest value. Times are of ``write`` and ``attend`` of one layer, the
layers chained as in a model; GB/s counts the keys and values read. Kernels of packed weights are
compared with MLX: they are some 700, which takes minutes. Exits 1 if a case fails.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

if __name__ == "__main__":
    # Long chunks use stock attention, which must not round to TF32; MLX reads this when loaded.
    os.environ.setdefault("MLX_ENABLE_TF32", "0")

import mlx.core as mx
import numpy as np

from benchmarks.gpu.check_packed import check_chains, check_packed, check_steps
from mlx_parallm.kernels.language import CudaLanguage, KernelLanguage, MetalLanguage, Tuning
from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.base import LayerShape
from mlx_parallm.worker.attention.kernel_backend import KernelAttention
from mlx_parallm.worker.attention.quantisation import KVQuantisation
from mlx_parallm.worker.attention.reference import ReferenceAttention
from tests.builders.kernel_cases import TOLERANCES, Case, Trial

BLOCK_SIZE = 16
DIM = 128
#: ``HEADS``: query heads and KV heads by model.
HEADS = {"Qwen3-8B": (32, 8), "Qwen3-0.6B": (16, 8)}
#: ``SIZES``: batch and context.
SIZES = ((1, 512), (8, 512), (32, 512), (32, 520), (128, 512), (64, 4096), (1, 16384))
#: ``LAYERS``: enough that no layer finds its keys in a cache, and few enough for the memory.
LAYERS = 24
MAX_POOL_BYTES = 24 << 30
REPEATS = 10


#: ``ROWS``: decode rows of very different lengths and a few tokens of one sequence.
ROWS = ((300, 1), (1000, 1), (4, 7), (0, 1), (2047, 1))
MIXED = ((200, 1), (0, 33), (700, 1), (64, 100), (9, 3))
FULL = Case(heads=8, key_dim=128, sequences=ROWS)


def cases() -> Iterator[Case]:
    """Yield cases of shapes, features of attention, quantised pools, and large batches."""
    yield from shapes()
    yield from features()
    for bits, group_size in itertools.product((8, 4), (32, 64)):
        scheme = KVQuantisation(bits=bits, group_size=group_size)
        yield from (
            replace(FULL, sequences=MIXED, quantisation=scheme, dtype=t) for t in TOLERANCES
        )
        yield replace(FULL, quantisation=scheme, key_dim=80, value_dim=112, dtype=mx.bfloat16)
    yield replace(FULL, sequences=((8191, 1),) + ((100, 1),) * 20, dtype=mx.bfloat16)
    yield replace(FULL, sequences=((50, 1),) * 300, dtype=mx.bfloat16)


def shapes() -> Iterator[Case]:
    """Yield cases of head sizes, dtypes, numbers of heads, and block sizes."""
    for dtype, dim in itertools.product(TOLERANCES, (64, 80, 96, 112, 128, 192, 256)):
        yield Case(dtype=dtype, key_dim=dim, heads=8, sequences=ROWS)
    yield Case(key_dim=192, value_dim=128, sequences=ROWS)
    yield Case(key_dim=64, value_dim=256, sequences=ROWS)
    for heads, kv_heads in ((2, 2), (16, 2), (7, 1), (12, 1), (24, 2), (32, 1)):
        yield Case(heads=heads, kv_heads=kv_heads, dtype=mx.bfloat16, key_dim=128, sequences=ROWS)
    for block_size in (4, 8, 32, 64, 48):
        yield Case(block_size=block_size, dtype=mx.bfloat16, key_dim=128, sequences=ROWS)


def features() -> Iterator[Case]:
    """Yield cases of windows, sinks, soft caps and biases by distance, alone and combined."""
    for dtype in TOLERANCES:
        yield replace(FULL, dtype=dtype, window=100)
        yield replace(FULL, dtype=dtype, sinks=True)
        yield replace(FULL, dtype=dtype, soft_cap=5.0)
        yield replace(FULL, dtype=dtype, window=300, sinks=True, soft_cap=5.0)
        yield replace(FULL, dtype=dtype, distances=129)
    for window, sinks in itertools.product((None, 50), (False, True)):
        yield replace(FULL, sequences=MIXED, window=window, sinks=sinks)
    yield replace(FULL, sequences=MIXED, soft_cap=5.0, sinks=True)
    yield replace(FULL, sequences=MIXED, distances=129, dtype=mx.bfloat16)
    yield replace(FULL, distances=129, dtype=mx.bfloat16, quantisation=KVQuantisation(bits=8))


def check(language: KernelLanguage, tuning: Tuning | None = None) -> int:
    """Print every case; the number that failed."""
    failed = 0
    for case in cases():
        trial = Trial(case)
        kernels = KernelAttention(
            case.block_size, language, quantisation=case.quantisation, tuning=tuning
        )
        started = time.perf_counter()
        error = trial.error(trial.run(kernels, trial.fill(kernels, poison=True)))
        seconds = time.perf_counter() - started
        beside = "-"
        if case.quantisation is None:
            reference = ReferenceAttention(case.block_size)
            pool = trial.fill(reference)
            mx.eval(pool.keys, pool.values)
            beside = f"{trial.error(trial.run(reference, pool)):.1e}"
        is_right = error <= case.tolerance
        failed += not is_right
        verdict = "ok  " if is_right else "FAIL"
        print(f"{verdict} {error:.1e} (reference {beside}) {seconds:5.1f} s  {case}", flush=True)
    failed += check_copies(language) + check_moves(language) + check_packed(language)
    return failed + check_chains(language) + check_steps(language) + check_order(language)


def check_copies(language: KernelLanguage) -> int:
    """Copy blocks in place, read them back, and return the number of failures."""
    backend = KernelAttention(BLOCK_SIZE, language)
    shape = LayerShape(num_kv_heads=3, key_dim=80, value_dim=64, dtype=mx.bfloat16)
    pool = backend.new_pool(shape, 64)
    pool.keys = mx.random.normal(pool.keys.shape).astype(mx.bfloat16)
    pool.values = mx.random.normal(pool.values.shape).astype(mx.bfloat16)
    pool.bind(language.bound)
    wanted = [mx.array(pool.keys), mx.array(pool.values)]
    sources, targets = mx.arange(0, 20), mx.arange(63, 43, -1)
    for array in wanted:
        array[targets] = array[sources]
    mx.eval(pool.keys, pool.values, wanted)
    backend.copy_blocks(pool, sources, targets)
    mx.eval(pool.arrays())
    same = all(
        mx.array_equal(a, b).item() for a, b in zip(wanted, (pool.keys, pool.values), strict=True)
    )
    print("ok   blocks copied in place" if same else "FAIL blocks copied in place", flush=True)
    return int(not same)


def check_moves(language: KernelLanguage) -> int:
    """Take blocks out and put others in while writes are in flight; return the failures.

    Each round writes a block, takes it, writes other rows into it, and puts what the round before
    took. Nothing is waited for until all rounds have been submitted.
    """
    failed = 0
    for bits in (None, 8, 4):
        scheme = None if bits is None else KVQuantisation(bits=bits)
        backend = KernelAttention(BLOCK_SIZE, language, quantisation=scheme)
        shape = LayerShape(num_kv_heads=8, key_dim=DIM, value_dim=DIM, dtype=mx.bfloat16)
        pool = backend.new_pool(shape, 300)
        table = tuple(range(256))
        sequence = ScheduledSequence(
            seq_id=0, slot=0, start=0, token_ids=(1,) * len(table) * BLOCK_SIZE, block_table=table
        )
        plan, blocks = backend.plan([sequence]), mx.array(table)
        rows = mx.zeros((len(table) * BLOCK_SIZE, 8, 1, DIM), mx.bfloat16)
        taken: list[mx.array] = []
        for number in range(40):
            backend.write(pool, plan, rows + number, rows - number)
            taken.append(backend.take_blocks(pool, blocks))
            backend.write(pool, plan, rows - 1, rows - 1)
            backend.put_blocks(pool, blocks, taken[-1])
            backend.copy_blocks(pool, mx.array([number]), mx.array([256 + number]))
            mx.async_eval(taken[-1], pool.token)
        keys, values = backend.gather(pool, mx.arange(256, 296)[:, None])
        seen = np.array(mx.stack([keys, -values]).astype(mx.float32))
        wanted = np.arange(40.0)[:, None, None, None]
        is_right = bool((np.abs(seen - wanted) < 0.01).all())
        failed += not is_right
        verdict = "ok  " if is_right else "FAIL"
        print(f"{verdict} 256 blocks taken and put in flight, KV in {bits} bits", flush=True)
    return failed


def check_order(language: KernelLanguage) -> int:
    """Read back many writes in flight, each by the next kernel; return the number of failures."""
    backend = KernelAttention(BLOCK_SIZE, language)
    shape = LayerShape(num_kv_heads=2, key_dim=64, value_dim=64, dtype=mx.float32)
    pool = backend.new_pool(shape, 64)
    table, rows = tuple(range(63, 59, -1)), 4 * BLOCK_SIZE
    seen = []
    for start in range(rows):
        sequence = ScheduledSequence(
            seq_id=0, slot=0, start=start, token_ids=(1,), block_table=table
        )
        value = mx.full((1, 2, 1, 64), start + 1, mx.float32)
        backend.write(pool, backend.plan([sequence]), value, -value)
        keys, values = backend.gather(pool, mx.array([table], mx.int32))
        seen.append(mx.stack([keys[0, 0, : start + 1, 0], -values[0, 1, : start + 1, 63]]))
    mx.eval(seen)
    right = all(
        np.array_equal(np.array(rows), np.tile(np.arange(1.0, i + 2), (2, 1)))
        for i, rows in enumerate(seen)
    )
    print(f"{'ok  ' if right else 'FAIL'} {rows} writes in flight, in order", flush=True)
    return int(not right)


def measure(
    language: KernelLanguage,
    tuning: Tuning | None = None,
    quantisation: KVQuantisation | None = None,
) -> None:
    """Print microseconds per layer and GB/s for every size."""
    for name, (heads, kv_heads) in HEADS.items():
        shape = LayerShape(num_kv_heads=kv_heads, key_dim=DIM, value_dim=DIM, dtype=mx.bfloat16)
        for batch, context in SIZES:
            backend = KernelAttention(
                BLOCK_SIZE, language, quantisation=quantisation, tuning=tuning
            )
            layers = attention_layers(backend, shape, heads, batch, context)
            micros = layer_time(layers)
            print(
                f"{name:10} batch {batch:3} context {context:5}: {micros:7.1f} us a layer, "
                f"{layers.read_bytes / micros / 1e3:6.0f} GB/s",
                flush=True,
            )


@dataclass(frozen=True, slots=True)
class AttentionLayers:
    """Layers of one shape, chained as in a model.

    Attributes:
        count: the number of layers.
        read_bytes: KV that a layer reads.
        run: returns the last output, not evaluated; with ``writes`` False layers only attend.
    """

    count: int
    read_bytes: int
    run: Callable[..., mx.array]


def attention_layers(
    backend: KernelAttention, shape: LayerShape, heads: int, batch: int, context: int
) -> AttentionLayers:
    """Return layers with rows whose blocks lie in random order."""
    blocks = -(-context // BLOCK_SIZE)
    bytes_per_token = backend.layout(shape).bytes_per_token
    pool_bytes = batch * blocks * BLOCK_SIZE * bytes_per_token
    layers = max(min(LAYERS, MAX_POOL_BYTES // pool_bytes), 1)
    pools = [backend.new_pool(shape, batch * blocks) for _ in range(layers)]
    order = np.random.default_rng(0).permutation(batch * blocks).reshape(batch, blocks).tolist()
    plan = backend.plan(
        [
            ScheduledSequence(
                seq_id=i, slot=i, start=context - 1, token_ids=(1,), block_table=tuple(table)
            )
            for i, table in enumerate(order)
        ]
    )
    new = mx.random.normal((batch, shape.num_kv_heads, 1, DIM)).astype(mx.bfloat16)
    queries = mx.random.normal((batch, heads, 1, DIM)).astype(mx.bfloat16)
    mx.eval(new, queries)

    def run(*, writes: bool = True) -> mx.array:
        hidden = queries
        for pool in pools:
            if writes:
                backend.write(pool, plan, new, new)
            # Each output is the next layer's query, so that layers do not overlap.
            hidden = backend.attend(pool, plan, hidden, scale=DIM**-0.5, window=None, sinks=None)
        return hidden

    return AttentionLayers(layers, batch * context * bytes_per_token, run)


def layer_time(layers: AttentionLayers) -> float:
    """Return the median microseconds of one layer's write and attention."""
    times = []
    for _ in range(REPEATS):
        hidden = layers.run()
        started = time.perf_counter()
        mx.eval(hidden)
        times.append((time.perf_counter() - started) / layers.count * 1e6)
    return sorted(times)[len(times) // 2]


def tunings(start: Tuning) -> Iterator[Tuning]:
    """Yield tunings that each change one value."""
    yield start
    yield from (replace(start, threadgroups=n) for n in (256, 1024, 2048))
    yield from (replace(start, warps=n) for n in (2, 8))
    yield replace(start, tile=8)
    yield replace(start, score_lanes=8)
    yield replace(start, max_heads=4)


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--only-errors", action="store_true", help="no times")
    parts.add_argument("--only-packed", action="store_true", help="errors of packed weights alone")
    parts.add_argument("--only-times", action="store_true", help="no errors")
    parser.add_argument("--tune", action="store_true", help="times of other divisions as well")
    options = parser.parse_args()
    language = MetalLanguage() if mx.metal.is_available() else CudaLanguage()
    print(f"{language.name}, mlx {getattr(mx, '__version__', '?')}, {mx.device_info()}", flush=True)
    if options.only_packed:
        failed = check_packed(language) + check_chains(language) + check_steps(language)
    else:
        failed = 0 if options.only_times else check(language)
    if not (options.only_errors or options.only_packed):
        for tuning in tunings(language.tuning) if options.tune else [language.tuning]:
            print(tuning, flush=True)
            measure(language, tuning)
        for bits in (8, 4):
            print(f"KV in {bits} bits", flush=True)
            measure(language, quantisation=KVQuantisation(bits=bits))
    print(f"{failed} failed" if failed else "done", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
