"""Compare ``/v1/rl/rollout`` with a loop over mlx_lm's ``batch_generate`` in process.

``python -m benchmarks.rollout``. Groups of samples of prompts of random tokens, at temperature 1,
with the log-probability of each sampled token; in float32, or with ``--gpu`` a random model of the
0.6B shape in bfloat16. The loop calls ``batch_generate`` once
for each group, as trainers do; the server gets all groups in one request, and its time ends when
the answer has been parsed. The loop's groups follow one another, so some of them suffice to
measure its rate (``--loop-prompts``). Both run their samples to the full length. Samples per
second of processor time are reported too: they hold on a machine that has other work.
"""

from __future__ import annotations

import os
import random
import shlex
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx2
import mlx.core as mx
import mlx_lm
from mlx_lm.generate import batch_generate
from mlx_lm.sample_utils import make_sampler

from benchmarks.checks import Check, conclude
from benchmarks.gpu.servers import FOLDER, SERVED
from benchmarks.make_model import make_model
from benchmarks.measure import make_parser
from benchmarks.servers import Server, mlx_parallm_server
from mlx_parallm.demo_models.folders import DEMO_FOLDER

TARGET = 3.0
TIMEOUT_S = 3600


class NoEnd:
    """A tokenizer whose samples end at their full length only."""

    eos_token_ids = ()

    def decode(self, ids: list[int]) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class Rates:
    """Samples per second of the clock, and of the processors' time of one process."""

    per_s: float
    per_cpu_s: float

    @classmethod
    def of(cls, work: Callable[[], None], pid: int, count: int) -> Rates:
        """Return the rates of work by a process that makes ``count`` samples."""
        begin, cpu = time.perf_counter(), cpu_s(pid)
        work()
        return cls(count / (time.perf_counter() - begin), count / (cpu_s(pid) - cpu))

    def __str__(self) -> str:
        return f"{self.per_s:.2f} samples/s ({self.per_cpu_s:.2f} per processor second)"


def cpu_s(pid: int) -> float:
    """Seconds that the threads of a process have run so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--loop-prompts", type=int, help="so many for the loop (default: all)")
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--gpu", action="store_true", help="the 0.6B shape in bfloat16")
    parser.set_defaults(model=None)
    args = parser.parse_args()
    dtype = "bfloat16" if args.gpu else "float32"
    if args.gpu:
        args.model = make_model(FOLDER, config=SERVED)
    model, tokenizer = mlx_lm.load(str(args.model or DEMO_FOLDER))[:2]
    model.set_dtype(getattr(mx, dtype))
    options = ["--dtype", dtype, *shlex.split(args.server_options)]
    loop, ours = [], []
    own_pid = os.getpid()
    with mlx_parallm_server(args.model and Path(args.model), options) as server:
        warm = Namespace(**(vars(args) | {"prompts": 1, "output_tokens": 8}))
        run_loop(model, make_prompts(tokenizer.vocab_size, warm, -1), warm)
        run_rollout(server, make_prompts(tokenizer.vocab_size, warm, -1), warm)
        for repetition in range(args.repetitions):
            prompts = make_prompts(tokenizer.vocab_size, args, repetition)
            some = prompts[: args.loop_prompts]
            loop.append(
                Rates.of(lambda: run_loop(model, some, args), own_pid, len(some) * args.group)  # noqa: B023
            )
            ours.append(
                Rates.of(
                    lambda: run_rollout(server, prompts, args),  # noqa: B023
                    server.process.pid,
                    len(prompts) * args.group,
                )
            )
            print(f"loop {loop[-1]}, rollout {ours[-1]}", flush=True)
    checks = [
        Check("batch_generate in a loop: samples/s", statistics.median(run.per_s for run in loop)),
        Check("/v1/rl/rollout: samples/s", statistics.median(run.per_s for run in ours)),
        Check("ratio", _ratio(loop, ours, "per_s"), ">=", TARGET),
        Check("ratio of samples per processor second", _ratio(loop, ours, "per_cpu_s")),
    ]
    settings = {name: str(value) for name, value in vars(args).items()}
    rates = {"loop": list(map(asdict, loop)), "rollout": list(map(asdict, ours))}
    return conclude("rollout", checks, {"settings": settings} | rates)


def _ratio(loop: list[Rates], ours: list[Rates], name: str) -> float:
    pairs = zip(loop, ours, strict=True)
    return statistics.median(getattr(new, name) / getattr(old, name) for old, new in pairs)


def make_prompts(vocab_size: int, args: Namespace, seed: int) -> list[list[int]]:
    """Return different random prompts."""
    source = random.Random(seed)
    return [
        [source.randrange(vocab_size) for _ in range(args.prompt_tokens)]
        for _ in range(args.prompts)
    ]


def run_loop(model: Any, prompts: list[list[int]], args: Namespace) -> None:
    """Generate with one call per group."""
    for prompt in prompts:
        made = batch_generate(
            model,
            NoEnd(),
            [prompt] * args.group,
            max_tokens=args.output_tokens,
            sampler=make_sampler(temp=1.0),
            return_token_ids=True,
            return_logprobs=True,
        )
        if any(len(ids) != args.output_tokens for ids in made.token_ids or ()):
            raise SystemExit("a sample ended early")


def run_rollout(server: Server, prompts: list[list[int]], args: Namespace) -> None:
    """Send one rollout request."""
    body = {
        "prompts": prompts,
        "n": args.group,
        "max_tokens": args.output_tokens,
        "temperature": 1.0,
        "ignore_eos": True,
        "seed": 1,
    }
    response = httpx2.post(f"{server.base_url}/v1/rl/rollout", json=body, timeout=TIMEOUT_S)
    response.raise_for_status()
    groups = response.json()["groups"]
    lengths = {len(sample["logprobs"]) for group in groups for sample in group["samples"]}
    if lengths != {args.output_tokens}:
        raise SystemExit("a sample ended early")


if __name__ == "__main__":
    sys.exit(main())
