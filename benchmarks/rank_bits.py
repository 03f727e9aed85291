"""Two ranks compute the same bits: digests of what they must have alike, over a mixed load.

``python -m benchmarks.rank_bits`` on a machine with two NVIDIA GPUs; ``--shape tiny --backend
ring`` on a CPU. Requests of all lengths begin, are chunked, share prefixes, fork, are preempted
and aborted while they decode, adapters are replaced and weights updated.

Each rank has half of the KV heads, so that its keys and values differ from the other's. Here the
second half of the heads of the model has the weights of the first. The digests of both pools are
equal only if the ranks had the same tokens, positions and blocks, and the same bits of every hidden
state, in all steps whose keys and values a pool still has.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx

from benchmarks.checks import RESULTS, Check, conclude
from benchmarks.rank_decode import ALL_SHAPES, NAME, make_adapter, make_folder
from benchmarks.rank_processes import BACKENDS, run_ranks
from benchmarks.rank_updates import tensors_of
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.cli.ranks import with_ranks
from mlx_parallm.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from mlx_parallm.engine.live_weights import WeightsUpdate
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.engine.policies import AdapterUpload
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.serving.build import build_engines, follow_ranks, install_loaders, worker_for
from mlx_parallm.serving.kinds import ignore_progress
from mlx_parallm.types.events import ErrorEvent, TokenEvent
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.types.step import Phase, ScheduledBatch
from mlx_parallm.worker.worker import Worker
from tests.rank_simulator import describe

RANKS = 2
# EVERY: the pools are digested before each step whose number this divides.
EVERY = 10
# LONGEST, ROOM: tokens of a request, and those that all together have memory for: too few.
LONGEST, ROOM = 1024, 6400
NUM_SEQS, BUDGET = 32, 512
# MULTIPLIER: any large odd number; this is about 2 ** 31 over the golden ratio.
MULTIPLIER = 0x4F1BBCDD
KV_MODULES = ("k_proj", "v_proj")
UPDATED = "model.layers.0.mlp.down_proj.weight"


class StepDigests:
    """Digests the batches and the pools of a rank. Implements ``StepTracer``.

    Attributes:
        worker: has the model.
        found: one digest for every ``EVERY`` steps.
        num_steps: the steps so far.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.found: list[str] = []
        self.num_steps = 0
        self._batches = hashlib.blake2b(digest_size=8)

    def span(
        self, phase: Phase, batch: ScheduledBatch | None = None
    ) -> AbstractContextManager[None]:
        """Digest a batch before its step is built."""
        if phase is Phase.BUILD and batch is not None:
            self._note(batch)
        return nullcontext()

    def _note(self, batch: ScheduledBatch) -> None:
        self._batches.update(describe(batch).encode())
        if self.num_steps % EVERY == 0:
            self.found.append(f"{self._batches.hexdigest()} {self._pools()}")
        self.num_steps += 1

    def _pools(self) -> str:
        """Return the digest of all keys and values."""
        # The model joins the worker's when it is loaded.
        model: Any = self.worker._models.get(NAME)
        arrays: list[mx.array] = [] if model is None else model._runner._path.arrays()
        digests = [_digest(array) for array in arrays]
        mx.eval(digests)
        return " ".join(f"{digest.item():x}" for digest in digests)


def _digest(array: mx.array) -> mx.array:
    """Return a digest of the bits of an array, computed on its device: uint64, a scalar.

    Each 32 bits of it count by an odd number of their place's own, modulo 2 ** 64.
    """
    words = array.view(mx.uint32).flatten().astype(mx.uint64)
    places = mx.arange(words.size, dtype=mx.uint64)
    return (words * (2 * places * MULTIPLIER + 1)).sum()


class MixedLoad:
    """Requests, adapters and weights that change at random in an engine that the caller steps.

    Attributes:
        seen: how often each thing happened.
    """

    def __init__(self, engine: Any, shape: str, weight: HostTensor) -> None:
        """Begin without requests.

        Args:
            engine: the engine.
            shape: the model's.
            weight: its ``UPDATED``, whose rows updates turn round.
        """
        self.seen: Counter[str] = Counter()
        self._engine = engine
        self._shape = shape
        self._weight = weight
        self._random = Random(0)
        self._numbers = count()
        self._ids: list[str] = []
        draw = self._random.randrange
        self._texts = [[draw(1, 4000) for _ in range(LONGEST)] for _ in range(6)]

    def step(self, number: int) -> None:
        """Change something, and run a step."""
        if number % 100 == 50:
            self._replace_adapter(number)
        if number % 250 == 200:
            self._update()
        if self._random.random() < 0.35 and self._engine.stats.num_waiting < NUM_SEQS:
            self._add()
        if self._ids and self._random.random() < 0.03:
            self.seen["aborted"] += self._engine.abort(self._random.choice(self._ids[-NUM_SEQS:]))
        for event in self._engine.step() or ():
            assert not isinstance(event, ErrorEvent), event
            if isinstance(event, TokenEvent):
                self.seen["tokens"] += len(event.token_ids)

    def end(self) -> None:
        """Let all requests end."""
        while self._engine.has_work():
            self._engine.step()
        stats = self._engine.stats
        self.seen |= Counter(preempted=stats.num_preemptions, cached_tokens=stats.prefix_hits)

    def _add(self) -> None:
        choose, number = self._random.choice, next(self._numbers)
        names = [info.name for info in self._engine.policies.infos()]
        request_id = f"r{number}"
        self._engine.submit(
            GenerateRequest(
                request_id=request_id,
                model=NAME,
                adapter=choose([None, *names]),
                prompt_ids=tuple(choose(self._texts)[: choose([3, 40, 40, 200, 700])]),
                params=SamplingParams(
                    n=choose([1, 1, 1, 2]),
                    max_tokens=choose([1, 20, 100, 200]),
                    temperature=choose([0.0, 1.0]),
                    seed=number,
                    ignore_eos=True,
                ),
            )
        )
        self.seen["requests"] += 1
        self._ids.append(request_id)

    def _replace_adapter(self, number: int) -> None:
        whole = make_adapter(self._shape, number).modules
        # Other factors for the second half of the KV heads would make the ranks' KV differ.
        modules = {key: part for key, part in whole.items() if not key.endswith(KV_MODULES)}
        weights = AdapterWeights(modules=modules)
        name = f"a{number // 100 % 3}"
        self._engine.policies.load(AdapterUpload(name=name, weights=weights, replaces=True))
        self.seen["adapters"] += 1

    def _update(self) -> None:
        self._weight = HostTensor(self._weight.array[::-1].copy(), self._weight.is_bfloat16)
        self._engine.live.prepare(WeightsUpdate(tensors={UPDATED: self._weight}))
        self._engine.settle()
        self._engine.live.commit()
        self.seen["updates"] += 1


def mirror(folder: Path, scale: float) -> None:
    """Give the second half of the KV heads the weights of the first.

    Args:
        folder: the model's.
        scale: what the second half is multiplied by; 1 but to see that digests then differ.
    """
    for path in sorted(folder.glob("*.safetensors")):
        arrays: Any = mx.load(str(path))
        for name in [name for name in arrays if name.removesuffix(".weight").endswith(KV_MODULES)]:
            half = mx.split(arrays[name], 2)[0]
            arrays[name] = mx.concatenate([half, half * scale])
        mx.eval(arrays)
        mx.save_safetensors(str(path), arrays)


def settings_of(arguments: argparse.Namespace) -> EngineConfig:
    """Return the engine's settings, with the ranks of this process."""
    shape = ALL_SHAPES[arguments.shape]
    token_bytes = shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * 2
    token_bytes *= 4 if arguments.shape == "tiny" else 2
    config = EngineConfig(
        models=(
            ModelConfig(path=str(arguments.folder), served_names=(NAME,), max_model_len=LONGEST),
        ),
        cache=CacheConfig(kv_cache_bytes=ROOM * token_bytes // RANKS),
        scheduler=SchedulerConfig(max_num_seqs=NUM_SEQS, max_num_batched_tokens=BUDGET),
        warm_up=False,
    )
    return with_ranks(config, ServerConfig(), os.environ)


def lead(arguments: argparse.Namespace, config: EngineConfig) -> dict[str, Any]:
    """Run the load as rank 0; return its digests and what happened."""
    families = MetricFamilies()
    with worker_for(config, families) as worker:
        worker.tracer = digests = StepDigests(worker)
        (built,) = build_engines(config, families, worker, ignore_progress)
        engine: Any = built.engine
        load = MixedLoad(engine, arguments.shape, tensors_of(arguments.folder)[UPDATED])
        for number in range(arguments.steps):
            load.step(number)
            if number % 100 == 0:
                print(f"step {number}: {dict(load.seen)}", flush=True)
        load.end()
        seen = dict(load.seen) | {"path": engine.info.path, "compiled": engine.info.is_compiled}
    return {"digests": digests.found, "steps": digests.num_steps, "seen": seen}


def follow(config: EngineConfig) -> dict[str, Any]:
    """Follow as rank 1; return its digests."""
    made: list[StepDigests] = []

    def install(worker: Worker) -> None:
        install_loaders(worker)
        worker.tracer = digests = StepDigests(worker)
        made.append(digests)

    follow_ranks(config, install)
    (digests,) = made
    return {"digests": digests.found, "steps": digests.num_steps}


def run_rank(arguments: argparse.Namespace) -> None:
    """Be one rank, and write what it found."""
    config = settings_of(arguments)
    result = follow(config) if config.ranks.rank else lead(arguments, config)
    arguments.output.with_suffix(f".{config.ranks.rank}.json").write_text(json.dumps(result))


def compare(results: list[dict[str, Any]]) -> list[Check]:
    """Return how many digests of the ranks are equal."""
    first, second = (result["digests"] for result in results)
    num_equal = sum(ours == theirs for ours, theirs in zip(first, second, strict=True))
    return [
        Check("steps", results[0]["steps"]),
        Check("digests of a rank that differ from each other", len(set(first))),
        Check("digests equal on both ranks", num_equal, "==", len(first)),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(ALL_SHAPES), default="0.6B")
    parser.add_argument("--backend", choices=BACKENDS, default="nccl")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument(
        "--second-half", type=float, default=1.0, help="another factor makes digests differ"
    )
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.output is not None:
        run_rank(arguments)
        return 0
    folder = make_folder(RESULTS / f"rank-bits-{arguments.shape}", arguments.shape)
    mirror(folder, arguments.second_half)
    output = RESULTS / "rank-bits"
    command = ["benchmarks.rank_bits", "--shape", arguments.shape, "--folder", str(folder)]
    command += ["--steps", str(arguments.steps), "--output", str(output)]
    outputs = [output.with_suffix(f".{rank}.json") for rank in range(RANKS)]
    for path in outputs:
        path.unlink(missing_ok=True)
    run_ranks(command, RANKS, arguments.backend)
    results = [json.loads(path.read_text()) for path in outputs]
    return conclude("rank_bits", compare(results), results[0]["seen"])


if __name__ == "__main__":
    raise SystemExit(main())
