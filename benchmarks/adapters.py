"""Steps whose rows have adapters against steps without.

``python -m benchmarks.adapters``; on a GPU with ``--gpu``: the 8B shape, and the targets.
All linear layers of a random model are adapted. Modes take turns in one process; a step is the
forward of one row each, greedy, one step ahead of its tokens where the attention backend allows it.
"One at a time" runs the rows of each adapter as a step of their own, as servers do that hold one
adapter. A mode is compared with base rows just before it, as a machine's speed changes. On a CPU it
is the time of the processor that counts, whatever else runs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from benchmarks.checks import Check, conclude
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.adapters.weights import AdapterWeights, LowRank
from mlx_parallm.config import CacheConfig
from mlx_parallm.models.checkpoints.decoder_sizes import query_heads
from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.backend_choice import choose_backend
from mlx_parallm.worker.attention.base import AttentionBackend
from mlx_parallm.worker.device.properties import backend_name
from mlx_parallm.worker.generation.cache_layout import KVLayout, leaves, probe_layout
from mlx_parallm.worker.generation.load.path_choice import choose_path
from mlx_parallm.worker.generation.paths.base import ForwardPath
from mlx_parallm.worker.generation.step_rows import token_array
from mlx_parallm.worker.lora.adapted_layers import AdaptedLayers, product_dtype
from mlx_parallm.worker.lora.adapter_check import choose_change_kernels
from mlx_parallm.worker.ops import at_once
from tests.builders.random_models import SHAPES, RandomModel, flatten, random_model

BLOCK = 16
WARM_STEPS = 3
ALL_BASE = "no adapters"
ONE_AT_A_TIME = "8 adapters, one at a time"
PREFILL = "prefill"
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DENSE = tuple(name for name, config in SHAPES.items() if config["model_type"] == "qwen3")


@dataclass(frozen=True, slots=True)
class Steps:
    """Runs decode steps over one context length."""

    path: ForwardPath
    backend: AttentionBackend
    context: int
    clock: Callable[[], float]

    def run(self, slots: Sequence[int], count: int) -> float:
        """Return the seconds per step of rows with these adapters, after a warm-up."""
        tokens = mx.zeros(len(slots), mx.int32)
        started = 0.0
        for number in range(-WARM_STEPS, count):
            if number == 0:
                mx.eval(tokens)
                started = self.clock()
            rows = self._rows(slots, self.context + WARM_STEPS + number)
            logits = self.path.logits(rows, tokens, list(range(len(slots))))
            chosen = mx.argmax(logits, axis=-1).astype(mx.int32)
            if self.backend.runs_ahead:
                mx.async_eval(chosen, self.path.arrays())
                mx.eval(tokens)
            else:
                mx.eval(chosen, self.path.arrays())
            tokens = chosen
        mx.eval(tokens)
        return (self.clock() - started) / count

    def prefill(self, slot: int, length: int) -> float:
        """Return the seconds of a step of one prompt."""
        (row,) = self._rows([slot], 0)
        tokens = tuple(range(length))
        sequence = ScheduledSequence(
            seq_id=0,
            slot=0,
            start=0,
            token_ids=tokens,
            block_table=row.block_table,
            adapter_slot=slot,
        )
        started = self.clock()
        mx.eval(
            self.path.logits([sequence], token_array([sequence]), [length - 1]), self.path.arrays()
        )
        return self.clock() - started

    def _rows(self, slots: Sequence[int], start: int) -> list[ScheduledSequence]:
        width = self.width
        return [
            ScheduledSequence(
                seq_id=row,
                slot=row,
                start=start,
                token_ids=(0,),
                block_table=tuple(range(row * width, (row + 1) * width)),
                adapter_slot=slot,
            )
            for row, slot in enumerate(slots)
        ]

    @property
    def width(self) -> int:
        """Blocks of a row."""
        return width_of(self.context)


def width_of(context: int) -> int:
    return -(-(context + 256) // BLOCK)


def make(model: RandomModel, batch: int, context: int) -> tuple[Steps, AdaptedLayers]:
    """Return the model on the path that it would be served on, without adapters."""
    if backend_name() == "cuda":
        flatten(model)
    layouts = probe_layout(model.model)
    kv_layouts = [layout for layout in leaves(layouts) if isinstance(layout, KVLayout)]
    shapes = [layout.shape for layout in kv_layouts if layout.shape is not None]
    heads = query_heads(model.loaded.config) or 1
    backend = choose_backend(CacheConfig(block_size=BLOCK), shapes, heads).backend
    path = at_once(choose_path)(
        model.model,
        layouts,
        backend,
        vocab_size=model.vocab_size,
        num_blocks=batch * width_of(context),
        block_size=BLOCK,
        dtype=model.loaded.dtype,
    ).path
    dtype = product_dtype(model.loaded.dtype)
    path.adapters.kernels, _ = choose_change_kernels(dtype)
    clock = time.process_time if backend_name() == "cpu" else time.perf_counter
    return Steps(path, backend, context, clock), AdaptedLayers(model.model, dtype, path.adapters)


def adapter(model: RandomModel, rank: int, seed: int) -> AdapterWeights:
    """Return a LoRA of all linear layers of the blocks, float32, small."""
    source = np.random.default_rng(seed)
    modules = {}
    for path, module in model.model.named_modules():
        if path.rpartition(".")[2] in LINEAR:
            out, inner = module.weight.shape
            a, b = (
                source.standard_normal(size, dtype=np.float32) * np.float32(0.01)
                for size in ((rank, inner), (out, rank))
            )
            modules[path] = LowRank(kind="linear", a=HostTensor(a), b=HostTensor(b), scale=1.0)
    return AdapterWeights(modules)


def main() -> int:
    args = make_parser().parse_args()
    if args.gpu:
        args.shape, args.dtype, args.context, args.steps = "8B", "bfloat16", 512, 24
    model = random_model(args.shape, dtype=getattr(mx, args.dtype))
    steps, layers = make(model, args.batch, args.context)
    alone = [steps.run([0] * args.batch, args.steps) for _ in range(args.repetitions + 1)][1:]
    put_ms = load(args, model, steps, layers)
    pairs = measure(args, steps)
    targets = {"8 adapters": 0.85, "32 adapters": 0.75} if args.gpu else {}
    middle = {name: statistics.median(own for _, own in times) for name, times in pairs.items()}
    share = {
        name: statistics.median(base / own for base, own in times) for name, times in pairs.items()
    }
    checks = [Check("no adapters, before any is loaded, ms", 1e3 * statistics.median(alone))]
    checks += [Check(f"{name}, ms", 1e3 * value) for name, value in middle.items()]
    checks += [
        Check(f"{name}: tokens/s relative to no adapters, fastest rounds", fastest(pairs[name]))
        for name in ("8 adapters", "32 adapters")
    ]
    checks += [
        Check(f"{name}: tokens/s relative to no adapters", share[name], ">=", targets.get(name))
        for name in (
            "1 adapter",
            "8 adapters",
            "32 adapters",
            "half of the rows without adapter",
            PREFILL,
        )
    ]
    faster = share["8 adapters"] / share[ONE_AT_A_TIME]
    checks += [
        Check("8 adapters: speedup over one at a time", faster, ">=", 4.0 if args.gpu else None),
        Check("load an adapter, ms", statistics.median(put_ms)),
        Check("memory of the loaded adapters, MB", layers.num_bytes / 1e6),
    ]
    details = {"settings": vars(args), "alone": alone, "pairs": pairs}
    return conclude("adapters_gpu" if args.gpu else "adapters", checks, details)


def fastest(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the share by the fastest steps, as on an undisturbed machine."""
    return min(base for base, _ in pairs) / min(own for _, own in pairs)


def load(
    args: argparse.Namespace, model: RandomModel, steps: Steps, layers: AdaptedLayers
) -> list[float]:
    """Return the milliseconds of loading each adapter."""
    made = [adapter(model, args.rank, seed) for seed in range(min(args.resident, 8))]
    taken = []
    for slot in range(1, args.resident + 1):
        started = steps.clock()
        layers.put(slot, made[slot % len(made)], param="adapter")
        taken.append(1e3 * (steps.clock() - started))
    return taken


def measure(args: argparse.Namespace, steps: Steps) -> dict[str, list[tuple[float, float]]]:
    """Return, by mode and repetition, the seconds of a preceding base step and of its own step."""
    batch = args.batch

    def distinct(count: int) -> list[int]:
        return [1 + row % min(count, args.resident) for row in range(batch)]

    def decode(slots: list[int]) -> Callable[[], float]:
        return lambda: steps.run(slots, args.steps)

    groups = [[slot] * (batch // 8) for slot in distinct(8)[:8]]
    base = decode([0] * batch)
    modes: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {
        ALL_BASE: (base, base),
        "1 adapter": (base, decode(distinct(1))),
        "8 adapters": (base, decode(distinct(8))),
        "32 adapters": (base, decode(distinct(32))),
        "half of the rows without adapter": (
            base,
            decode([slot * (row % 2) for row, slot in enumerate(distinct(8))]),
        ),
        ONE_AT_A_TIME: (
            base,
            lambda: sum(steps.run(group, max(1, args.steps // 4)) for group in groups),
        ),
        PREFILL: (
            lambda: steps.prefill(0, args.context),
            lambda: steps.prefill(1, args.context),
        ),
    }
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in modes}
    for repetition in range(args.repetitions + 1):
        for name, (reference, run) in modes.items():
            logits = reference(), run()
            if repetition:  # the first repetition warms up
                pairs[name].append(logits)
    return pairs


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="the 8B shape in bfloat16, with targets")
    parser.add_argument("--shape", default="small", choices=DENSE)
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=256, help="tokens of each row")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--resident", type=int, default=64, help="adapters in memory")
    parser.add_argument("--steps", type=int, default=8, help="timed in one go")
    parser.add_argument("--repetitions", type=int, default=5)
    return parser


if __name__ == "__main__":
    sys.exit(main())
