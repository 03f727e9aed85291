"""Compare throughput and latency with ``mlx_lm.server``: same weights, same requests, one run.

``python -m benchmarks.throughput`` starts the two servers in turn, several times, each freshly and
in alternating order, and compares the medians. Times to first token and between tokens are those
a streaming client sees; tokens are those counted in ``usage``. The load without seeds has no
target: it is there because ``mlx_lm.server`` serves requests with a seed one at a time.
"""

from __future__ import annotations

import shlex
import statistics
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.checks import Check, conclude
from benchmarks.measure import (
    add_engines,
    chat_like_workload,
    engine_flags,
    make_parser,
    name_for,
    prepare_model,
    require_full_length,
    run_workload,
    warm_up,
)
from benchmarks.servers import Server, mlx_lm_server, mlx_parallm_server
from mlx_parallm.bench.statistics import Summary, summarise
from mlx_parallm.bench.workload import Workload

BASELINE, OURS = "mlx_lm.server", "mlx_parallm"
GREEDY, SEEDED, UNSEEDED, ALONE = (
    "temperature 0",
    "temperature 0.8, seeded",
    "temperature 0.8, no seeds",
    "one client",
)
# RATES: how many times the tokens/s at temperature 0, with one engine and with several.
RATES = (2.0, 2.2)
Figures = dict[str, list[Summary]]


@dataclass(slots=True)
class Measured:
    """All runs of one server: figures by load, and the temperature-0 texts in their order."""

    figures: Figures
    greedy_texts: list[str]


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--num-greedy", type=int, default=128, help="requests at temperature 0")
    parser.add_argument("--num-sampled", type=int, default=96, help="at temperature 0.8, each way")
    parser.add_argument("--num-alone", type=int, default=12, help="requests of the one client")
    add_engines(parser)
    args = parser.parse_args()
    model = prepare_model(args.model)
    measured = {
        name: Measured({load: [] for load in (GREEDY, SEEDED, UNSEEDED, ALONE)}, [])
        for name in (BASELINE, OURS)
    }
    for repetition in range(args.repetitions):
        names = (BASELINE, OURS) if repetition % 2 == 0 else (OURS, BASELINE)
        for name in names:
            with _start(name, model, args) as server:
                _measure(server, measured[name], repetition, args)
    checks = make_checks(measured[BASELINE], measured[OURS], RATES[args.engines > 1])
    return conclude(name_for("throughput", args.engines), checks, _details(measured, args))


def _start(name: str, model: Any, args: Namespace) -> AbstractContextManager[Server]:
    if name == BASELINE:
        return mlx_lm_server(model)
    return mlx_parallm_server(model, [*shlex.split(args.server_options), *engine_flags(args)])


def _measure(server: Server, measured: Measured, repetition: int, args: Namespace) -> None:
    warm_up(server, args.concurrency)
    for load, (workload, concurrency) in _workloads(repetition, args).items():
        records = run_workload(server, workload, concurrency)
        require_full_length(server, workload, records)
        summary = summarise(records)
        measured.figures[load].append(summary)
        if load == GREEDY:
            measured.greedy_texts += [record.text for record in records]
        print(f"{repetition} {server.name:<14} {load:<24} {_line(summary)}", flush=True)


def _workloads(repetition: int, args: Namespace) -> dict[str, tuple[Workload, int]]:
    seed, clients = 1000 * (repetition + 1), args.concurrency
    warm = {"temperature": 0.8}
    return {
        GREEDY: (chat_like_workload(args.num_greedy, seed), clients),
        SEEDED: (
            chat_like_workload(args.num_sampled, seed + 1, seed_requests=True, **warm),
            clients,
        ),
        UNSEEDED: (chat_like_workload(args.num_sampled, seed + 2, **warm), clients),
        ALONE: (chat_like_workload(args.num_alone, seed + 3), 1),
    }


def _line(summary: Summary) -> str:
    return (
        f"{summary.output_tokens_per_s:7.0f} tokens/s"
        f"  TTFT p50 {summary.ttft_ms.p50:6.0f} p99 {summary.ttft_ms.p99:6.0f}"
        f"  ITL p50 {summary.itl_ms.p50:5.1f} p99 {summary.itl_ms.p99:6.1f} ms"
    )


def make_checks(baseline: Measured, ours: Measured, rate_at_zero: float) -> list[Check]:
    """Return the targets of the comparison, each as a ratio of medians.

    ``rate_at_zero`` is the target of tokens/s at temperature 0.
    """
    targets: dict[str, tuple[float | None, float | None, float | None]] = {
        GREEDY: (rate_at_zero, 0.5, 1.0),
        SEEDED: (2.0, 0.5, 1.0),
        UNSEEDED: (None, None, None),
        ALONE: (1.0, None, None),
    }
    checks: list[Check] = []
    for load, (rate, ttft, itl) in targets.items():
        old, new = (_medians(side.figures[load]) for side in (baseline, ours))
        checks += [
            Check(f"{load}: tokens/s ratio", new["tokens/s"] / old["tokens/s"], ">=", rate),
            Check(f"{load}: TTFT p99 ratio", new["ttft"] / old["ttft"], "<=", ttft),
            Check(f"{load}: ITL p99 ratio", new["itl"] / old["itl"], "<=", itl),
        ]
    # mlx_lm's streaming detokenizer drops a leading space; vLLM and this server keep it.
    pairs = zip(baseline.greedy_texts, ours.greedy_texts, strict=True)
    equal = sum(old.removeprefix(" ") == new.removeprefix(" ") for old, new in pairs)
    return [*checks, Check("equal temperature-0 texts", equal / len(ours.greedy_texts), "==", 1.0)]


def _medians(summaries: Sequence[Summary]) -> Mapping[str, float]:
    return {
        "tokens/s": statistics.median(run.output_tokens_per_s for run in summaries),
        "ttft": statistics.median(run.ttft_ms.p99 for run in summaries),
        "itl": statistics.median(run.itl_ms.p99 for run in summaries),
    }


def _details(measured: Mapping[str, Measured], args: Namespace) -> dict[str, Any]:
    runs = {
        name: {load: [asdict(run) for run in runs] for load, runs in side.figures.items()}
        for name, side in measured.items()
    }
    settings = {name: str(value) for name, value in vars(args).items()}
    return {"settings": settings, "runs": runs}


if __name__ == "__main__":
    sys.exit(main())
