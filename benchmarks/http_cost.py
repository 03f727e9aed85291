"""Measure the processor time of HTTP: of a request for an embedding, of a chat, of a token.

``python -m benchmarks.http_cost``. The server is real, its engines compute nothing. With ``--other
FOLDER``, a checkout of another version, both versions are measured in turns; the ratios are this
version over that one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.checks import Check, conclude
from benchmarks.measure import BenchmarkError
from benchmarks.raw_clients import Clients, json_post
from mlx_parallm.peers.child_process import COMMAND, ChildProcess

HERE = Path(__file__).resolve().parent
TEXT = "A short text, such as people search for."
MESSAGES = [{"role": "user", "content": "What is 17 + 25?"}]
CLIENTS, STREAMS = 32, 128
# SKIPPED: tokens of each stream before the measured ones, while streams begin.
SKIPPED = 20
# TARGETS: largest ratios to the version before these costs were cut (benchmarks/results/http.md).
TARGETS = {"embedding, base64": 0.6, "streamed token": 0.75}
THREADS = ("loop", "process")


class Server:
    """A server in a process of its own, with the package of one checkout."""

    def __init__(self, checkout: Path, *options: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(checkout)}
        self._process = ChildProcess(
            [COMMAND, sys.executable, str(HERE / "http_server.py"), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd=checkout,
            text=True,
        )
        self.port = int(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None, "it is a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise BenchmarkError("the server ended")
        return line

    def seconds(self) -> dict[str, float]:
        """Return the processor seconds so far, of the loop's thread and of the process."""
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return json.loads(self._line())

    def stop(self) -> None:
        """End it."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()


def request_us(server: Server, path: str, body: dict[str, Any], count: int) -> dict[str, float]:
    """Return the processor time of one of ``count`` requests, in µs."""
    clients = Clients(server.port, CLIENTS, json_post(path, body))
    with contextlib.closing(clients):
        clients.answers(2 * CLIENTS)
        before = server.seconds()
        clients.answers(count)
        after = server.seconds()
    return {name: 1e6 * (after[name] - before[name]) / count for name in THREADS}


def token_us(server: Server, num_tokens: int) -> dict[str, float]:
    """Return the processor time of one of the streamed tokens, in µs."""
    body = chat_body(SKIPPED + num_tokens) | {"stream": True}
    clients = Clients(server.port, STREAMS, json_post("/v1/chat/completions", body))
    before: dict[str, float] = {}
    with contextlib.closing(clients):
        count = clients.events(STREAMS * SKIPPED, lambda: before.update(server.seconds()))
        after = server.seconds()
    if count < 0.8 * STREAMS * num_tokens:
        raise BenchmarkError(f"the server joined tokens: {count} events")
    return {name: 1e6 * (after[name] - before[name]) / count for name in THREADS}


def chat_body(max_tokens: int) -> dict[str, Any]:
    """Return a chat that is answered with so many tokens."""
    return {
        "model": "chat",
        "messages": MESSAGES,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def embedding_us(server: Server, num_requests: int, encoding: str) -> dict[str, float]:
    """Return the processor time of a request for the vector of a short text, in µs."""
    body = {"model": "embed", "input": TEXT, "encoding_format": encoding}
    return request_us(server, "/v1/embeddings", body, num_requests)


def chat_us(server: Server, num_requests: int) -> dict[str, float]:
    """Return the processor time of a chat that is answered as a whole, in µs."""
    return request_us(server, "/v1/chat/completions", chat_body(8), num_requests)


#: What is measured, by its name, with the share of ``--requests`` that it takes.
MEASURED: dict[str, tuple[Callable[[Server, int], dict[str, float]], float]] = {
    "embedding, base64": (partial(embedding_us, encoding="base64"), 1),
    "embedding, numbers": (partial(embedding_us, encoding="float"), 1),
    "chat of 8 tokens": (chat_us, 1 / 2),
    "streamed token": (token_us, 1 / 10),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", type=Path, help="a checkout of another version")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--only", choices=MEASURED, help="measure this only")
    args = parser.parse_args()
    checkouts = {"this": HERE.parent} | ({"other": args.other.resolve()} if args.other else {})
    with contextlib.ExitStack() as stack:
        servers: dict[str, Server] = {}
        for name, checkout in checkouts.items():
            servers[name] = Server(checkout)
            stack.callback(servers[name].stop)
        figures = {
            what: measure(servers, what, args.rounds, args.requests)
            for what in ([args.only] if args.only else MEASURED)
        }
    return conclude("http_cost", checks_of(figures), {"rounds": figures})


def measure(
    servers: dict[str, Server], what: str, num_rounds: int, num_requests: int
) -> list[dict[str, dict[str, float]]]:
    """Return the figures of each round, by server and thread, after a round that does not count.

    The servers take turns, and the order of the turns changes from round to round.
    """
    cost_us, share = MEASURED[what]
    count = max(CLIENTS, int(num_requests * share))
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(num_rounds + 1):
        names = list(servers)[:: -1 if number % 2 else 1]
        rounds.append({name: cost_us(servers[name], count) for name in names})
    return rounds[1:]


def checks_of(figures: dict[str, list[dict[str, dict[str, float]]]]) -> list[Check]:
    """Return the medians of both versions, and the medians of their ratios."""
    checks: list[Check] = []
    for what, rounds in figures.items():
        for thread in THREADS:
            checks += [
                Check(
                    f"{what}: {thread}, {name}, us",
                    statistics.median(each[name][thread] for each in rounds),
                )
                for name in sorted(rounds[0])
            ]
            if "other" in rounds[0]:
                limit = TARGETS.get(what) if thread == "loop" else None
                ratio = statistics.median(
                    each["this"][thread] / each["other"][thread] for each in rounds
                )
                checks.append(Check(f"{what}: {thread}, ratio", ratio, "<=", limit))
    return checks


if __name__ == "__main__":
    sys.exit(main())
