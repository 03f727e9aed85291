"""Check the ranks of a hostfile: exact answers, faults and latency; print a report to send.

    make cluster-check HOSTS=hosts.json

Run it on the machine of rank 0, with this repository and its environment at the same path on all
machines. The answers are compared with those of one process on this machine, which must hold the
model. Then a rank is killed, and one is stopped; MPI cannot, because it passes no input to ranks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.checks import RESULTS, Check, conclude
from benchmarks.cluster_answers import STREAMS, Answers, ask, compare
from benchmarks.cluster_faults import NUM_STREAMS, Fault, break_rank
from benchmarks.launched_world import SECONDS_STOPPED, LaunchedWorld, launch_command
from benchmarks.servers import free_port, running_server
from mlx_parallm.peers.child_process import run

DEMO = "mlx-parallm-demo"
# FLAGS: prompts of a few hundred tokens are cut into chunks beside decoding rows.
FLAGS = ("--max-num-batched-tokens", "256")
# TIMEOUT_S: seconds without progress after which ranks count as lost.
TIMEOUT_S = 3.0
# START_S, END_S: most seconds for a start, and for the end of all ranks after a fault.
START_S, END_S = 900.0, 60.0


def doctor(hostfile: Path, python: str) -> dict[str, Any]:
    """Return what ``doctor`` reports of the ranks."""
    command = [python, "-m", "mlx_parallm", "doctor", "--json"]
    done = run(launch_command(hostfile, command), data="", stdout=-1, text=True)
    start = done.stdout.find("{")
    if start < 0:
        raise SystemExit("doctor has no report; see the errors above")
    report, _ = json.JSONDecoder().raw_decode(done.stdout, start)
    return report


class Checker:
    """Runs the rows, and keeps their results."""

    def __init__(self, args: argparse.Namespace, log: Path) -> None:
        self._hosts: Path = args.hosts
        self._python: str = args.python
        self._flags = ["--model", args.model, *FLAGS, *args.serve_flags]
        self._is_demo = args.model == DEMO
        self._tolerance: float = args.tolerance or (1e-4 if self._is_demo else 0.1)
        self._log = log
        self.checks: list[Check] = []
        self.details: dict[str, Any] = {"flags": self._flags}

    def run(self) -> None:
        """Run all rows."""
        self.check_links()
        command = ["mlx_parallm", "serve", *self._flags]
        with running_server("one process", command, None) as server:
            alone = asyncio.run(ask(server.base_url, is_demo=self._is_demo))
        with self.started() as world:
            answers = asyncio.run(ask(world.base_url, is_demo=self._is_demo))
            self.check_answers(alone, answers)
            self.check_fault("killed", asyncio.run(break_rank(world, "kill", END_S)), 2.0)
        with self.started("--distributed-timeout", str(TIMEOUT_S)) as world:
            again = asyncio.run(ask(world.base_url, is_demo=self._is_demo, is_timed=False))
            num_equal, _ = compare(again, answers)
            total = len(again.samples)
            self.checks.append(Check("started again: samples as before", num_equal, "==", total))
            end_s = END_S + SECONDS_STOPPED
            fault = asyncio.run(break_rank(world, "stop", end_s))
            self.check_fault("stopped", fault, TIMEOUT_S + 2.0)

    @contextmanager
    def started(self, *flags: str) -> Iterator[LaunchedWorld]:
        """Yield the server over all ranks, once it answers."""
        flags = (*self._flags, *flags)
        port = free_port()
        with closing(LaunchedWorld(self._hosts, flags, port, self._log, self._python)) as world:
            world.wait_until_ready(START_S)
            yield world

    def check_links(self) -> None:
        """Report on the ranks and their links."""
        report = doctor(self._hosts, self._python)
        world = self.details["world"] = report.pop("world")
        self.details["doctor"] = report
        self.checks += [
            Check("ranks", len(world["ranks"])),
            Check("ranks can serve together", int(world["difference"] is None), "==", 1),
            Check("a sum of 8 KiB, us", world["sums"]["small_us"]),
            Check("a sum of 64 MiB, GB/s", world["sums"]["large_gb_per_s"]),
            Check("answers of all ranks over the log, us", world["log_us"]),
        ]

    def check_answers(self, alone: Answers, world: Answers) -> None:
        """Compare all ranks with one process."""
        num_equal, largest = compare(world, alone)
        limit = len(alone.samples) if self._is_demo else None
        self.checks += [
            Check("samples", len(alone.samples)),
            Check("samples with the tokens of one process", num_equal, "==", limit),
            Check("largest difference of log-probabilities", largest, "<=", self._tolerance),
            Check("digests of the weights agree", int(world.digests == alone.digests), "==", 1),
        ]
        for streams in STREAMS:
            self.checks += [
                Check(f"step of {streams} streams, one process, ms", alone.step_ms[streams]),
                Check(f"step of {streams} streams, all ranks, ms", world.step_ms[streams]),
            ]
        self.details["metrics"] = world.metrics

    def check_fault(self, name: str, fault: Fault, most_s: float) -> None:
        """Judge what followed a fault, which is noticed within ``most_s``."""
        self.checks += [
            Check(f"{name}: streams ended with an error", fault.num_errors, "==", NUM_STREAMS),
            Check(f"{name}: s until /health is not 200", fault.unhealthy_s, "<=", most_s),
            Check(f"{name}: s until all ranks have ended", fault.ended_s),
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=Path, required=True, help="a hostfile of mlx.launch")
    parser.add_argument("--model", default=DEMO, help="a folder or hub id")
    parser.add_argument(
        "--tolerance",
        type=float,
        help="of log-probabilities; 0.0001 for the demonstration model, 0.1 for others",
    )
    parser.add_argument(
        "--python", default=sys.executable, help="the interpreter's path on all machines"
    )
    parser.add_argument(
        "serve_flags", nargs="*", help="further flags of mlx_parallm serve, after --"
    )
    args = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    checker = Checker(args, RESULTS / "check_cluster.log")
    checker.run()
    return conclude("check_cluster", checker.checks, checker.details)


if __name__ == "__main__":
    sys.exit(main())
