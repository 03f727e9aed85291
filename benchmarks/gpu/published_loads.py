"""The loads whose figures vLLM and SGLang publish, at 1, 32 and 256 clients, on an 8B model.

``python -m benchmarks.gpu.published_loads`` writes random weights of Qwen3-8B's shape in bfloat16
to ``--folder``, and measures servers of it one after the other. Each load is sent by ``mlx_parallm
bench serve``. ``--budget-s`` bounds the whole run: what does not fit is left out. ``--shrink`` runs
the same on the benchmark model, to see on a CPU that it runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.servers import SERVED
from benchmarks.make_model import make_model
from benchmarks.servers import Server, mlx_parallm_server
from mlx_parallm.worker.device.properties import backend_name

FOLDER = Path("results/gpu-model-8b")
SHAPE = SERVED | {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "vocab_size": 151_936,
}
#: ``OPTIONS``: flags of every server.
OPTIONS = ("--max-num-seqs", "256", "--disable-access-log")


@dataclass(frozen=True, slots=True)
class ServerKind:
    """A way to serve: further flags, and the engines, each of which gets a load of its own."""

    options: Sequence[str] = ()
    num_engines: int = 1


#: ``SERVERS``: the kinds of servers, by the name on the command line.
SERVERS: Mapping[str, ServerKind] = {
    "one": ServerKind(),
    "engine": ServerKind(("--engine-process",)),
    "http2": ServerKind(("--api-server-count", "2")),
    "http4": ServerKind(("--api-server-count", "4")),
    "unbounded": ServerKind(("--engine-process", "--max-decode-stall-ms", "0")),
    "dp2": ServerKind(("--data-parallel-size", "2", "--api-server-count", "4"), num_engines=2),
}
#: ``PREPARED``: what the log has once an idle server has run a step of each shape.
PREPARED, MOST_PREPARING_S = "shapes prepared", 60.0
#: ``MARGIN_S``: seconds of the budget that are left for ending a server.
MARGIN_S = 8.0
MAX_PROCESSES = 16
#: ``MANY``: fewest clients of the loads that are sent to several engines.
MANY = 256


@dataclass(frozen=True, slots=True)
class PublishedLoad:
    """A closed loop of streaming clients.

    Attributes:
        name: in the results.
        clients: how many at once.
        prompt: tokens of every prompt.
        output: tokens of every answer.
        requests: in all.
        ramp_s: seconds over which the clients start.
    """

    name: str
    clients: int
    prompt: int
    output: int
    requests: int
    ramp_s: float = 0.0

    def of_engines(self, count: int) -> PublishedLoad:
        """Return the load of so many engines."""
        return replace(self, clients=count * self.clients, requests=count * self.requests)


LOADS = (
    PublishedLoad("256 clients, 350/200", 256, 350, 200, 768),
    PublishedLoad("256 clients, 220/200", 256, 220, 200, 768),
    PublishedLoad("1 client, 512/100", 1, 512, 100, 6),
    PublishedLoad("32 clients, 350/200", 32, 350, 200, 96),
    PublishedLoad("256 clients over 3 s, 350/200", 256, 350, 200, 768, ramp_s=3.0),
)


def main() -> int:
    args = make_parser().parse_args()
    begin_s = time.monotonic()
    end_s = begin_s + args.budget_s - MARGIN_S
    model = make_model(args.folder) if args.shrink else make_model(args.folder, config=SHAPE)
    print(f"the model took {time.monotonic() - begin_s:.0f} s", flush=True)
    if args.make_only:
        return 0
    results: dict[str, dict[str, Any]] = {}
    for name in args.servers:
        if time.monotonic() > end_s:
            print(f"{name}: out of time", flush=True)
            continue
        results[name] = {}
        kind = SERVERS[name]
        with mlx_parallm_server(model, [*OPTIONS, *kind.options, *args.options]) as server:
            _await_shapes(server, end_s)
            print(f"{name} serves after {time.monotonic() - begin_s:.0f} s", flush=True)
            for load in LOADS:
                is_asked = not args.loads or any(map(load.name.startswith, args.loads))
                if not is_asked or (kind.num_engines > 1 and load.clients < MANY):
                    continue
                own = load.of_engines(kind.num_engines)
                figures = measure(server, own, end_s, is_shrunk=args.shrink)
                results[name][load.name] = figures
                args.output.parent.mkdir(parents=True, exist_ok=True)
                args.output.write_text(json.dumps(results, indent=1) + "\n")
                print(f"{name}, {load.name}: {json.dumps(figures)}", flush=True)
            results[name]["log"] = server.log_tail(12)
            args.output.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.published_loads", description=__doc__
    )
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=["engine"])
    parser.add_argument("--loads", nargs="+", help="only those whose names begin so")
    parser.add_argument("--options", nargs="*", default=[], help="further flags of the servers")
    parser.add_argument("--budget-s", type=float, default=200.0)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--output", type=Path, default=Path("results/published_loads.json"))
    parser.add_argument("--make-only", action="store_true", help="write the model, and end")
    parser.add_argument("--shrink", action="store_true", help="a small model, and few requests")
    return parser


def measure(
    server: Server, load: PublishedLoad, end_s: float, *, is_shrunk: bool
) -> dict[str, float | str]:
    """Return the figures of a load, times in milliseconds; or why there are none."""
    requests = max(load.clients, load.requests // 16) if is_shrunk else load.requests
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run.json"
        command = [
            *(sys.executable, "-m", "mlx_parallm", "bench", "serve"),
            *("--url", server.base_url, "--token-ids", "4000"),
            *("--prompt-lengths", str(load.prompt), "--output-lengths", str(load.output)),
            *("--num-requests", str(requests), "--concurrency", str(load.clients)),
            *("--processes", str(min(MAX_PROCESSES, -(-load.clients // 32)))),
            *("--ramp-s", str(load.ramp_s), "--output", str(output)),
            *("--num-warmups", str(min(load.clients, 32))),
        ]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=max(1.0, end_s - time.monotonic()),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"missing": "out of time"}
        if done.returncode:
            return {"missing": (done.stderr or done.stdout)[-300:]}
        return figures_of(json.loads(output.read_text()))


def figures_of(run: Mapping[str, Any]) -> dict[str, float | str]:
    """Return what vLLM and SGLang report of such a run."""
    summary = run["summary"]
    tokens = summary["prompt_tokens"] + summary["output_tokens"]
    first_to_last = [sum(record["chunk_gaps_ms"]) for record in run["requests"]]
    figures: dict[str, float | str] = {
        "requests": summary["num_requests"],
        "output tokens/s": summary["output_tokens_per_s"],
        "tokens/s": tokens / summary["duration_s"],
        "first to last p50": statistics.median(first_to_last),
    }
    for label, spread in (
        ("TTFT", "ttft_ms"),
        ("ITL", "itl_ms"),
        ("gap", "chunk_gap_ms"),
        ("TPOT", "tpot_ms"),
        ("E2E", "latency_ms"),
    ):
        figures |= {f"{label} {share}": summary[spread][share] for share in ("p50", "p99")}
    for cost in run["processes"]:
        figures[f"CPU s of {cost['role']}"] = cost["cpu_s"]
    return {
        name: value if isinstance(value, str) else float(f"{value:.5g}")
        for name, value in figures.items()
    }


def _await_shapes(server: Server, end_s: float) -> None:
    """Wait until an idle server on an NVIDIA GPU has prepared its shapes."""
    until_s = min(time.monotonic() + MOST_PREPARING_S, end_s)
    while backend_name() == "cuda" and PREPARED not in server.log_tail(1000):
        if time.monotonic() > until_s:
            print("shapes are not prepared", flush=True)
            return
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
