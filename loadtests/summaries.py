"""Summaries by an encoder-decoder: one client, then many, then clients that hang up.

``python -m loadtests.summaries`` serves a model of T5-small's shape and sends 500 sources of mixed
length by 32 clients. The exit status is 0 if they get at least four times the tokens per second of
one client, if every answer is the one that a client alone gets, and if clients that hang up in the
middle of an answer leave no request and no KV block behind.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from benchmarks.checks import RESULTS, Check, conclude
from benchmarks.make_seq2seq import SHAPES, make_seq2seq, words
from benchmarks.servers import SERVED_NAME, Server, mlx_parallm_server
from loadtests.exchange import Answer, WrongAnswerError, ask, ask_and_leave
from loadtests.run import LEFT_BEHIND, wait_until_idle

ROUTE = "/v1/completions"
LEAST = 4.0
# LENGTHS, NEW_TOKENS: fewest and most tokens of a source and of its summary.
LENGTHS, NEW_TOKENS = (20, 400), (16, 64)
# EVENTS_READ: of an answer whose client hangs up.
EVENTS_READ = 3
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Round:
    """Some requests.

    Attributes:
        answers: theirs, None where one failed.
        seconds: that they took.
        processor_s: processor seconds of the server.
    """

    answers: list[Answer | None]
    seconds: float
    processor_s: float

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all answers per second."""
        return self.tokens / self.seconds

    @property
    def tokens_per_processor_s(self) -> float:
        """Output tokens per processor second, which other work of a machine changes less."""
        return self.tokens / self.processor_s

    @property
    def tokens(self) -> int:
        """Output tokens of all answers."""
        return sum(answer.output_tokens for answer in self.answers if answer)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="t5-small")
    parser.add_argument("--summaries", type=int, default=500)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--alone", type=int, default=40, help="of them, asked by one client first")
    parser.add_argument("--server-options", default="", help="more flags for the server")
    args = parser.parse_args()
    model = make_seq2seq(RESULTS / f"seq2seq_{args.shape}", args.shape)
    bodies = make_bodies(args.summaries, SHAPES[args.shape]["vocab_size"])
    with mlx_parallm_server(model, shlex.split(args.server_options)) as server:
        checks = run(server, bodies, args)
        checks.append(Check("load average of the machine", os.getloadavg()[0]))
        if any(check.verdict == "FAIL" for check in checks):
            print(server.log_tail())
    return conclude("summaries", checks, {"shape": args.shape, "clients": args.clients})


def make_bodies(count: int, vocab_size: int) -> list[dict[str, Any]]:
    """Return requests for summaries of random words."""
    draw = random.Random(0)
    vocabulary = words(vocab_size)[3:]
    return [
        {
            "model": SERVED_NAME,
            "prompt": " ".join(draw.choices(vocabulary, k=draw.randint(*LENGTHS))),
            "max_tokens": draw.randint(*NEW_TOKENS),
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for _ in range(count)
    ]


def run(server: Server, bodies: Sequence[dict[str, Any]], args: argparse.Namespace) -> list[Check]:
    """Return the checks of all rounds."""
    # Sources of the load are encoded anew, because these have another salt.
    salted = [body | {"cache_salt": "alone"} for body in bodies[: args.alone]]
    send(server, salted[:1], 1)
    alone = send(server, salted, 1)
    print(f"one client: {alone.tokens_per_s:.1f} tokens/s", flush=True)
    load = send(server, bodies, args.clients)
    print(f"{args.clients} clients: {load.tokens_per_s:.1f} tokens/s", flush=True)
    pairs = list(zip(alone.answers, load.answers, strict=False))
    gain = load.tokens_per_processor_s / alone.tokens_per_processor_s
    cut = run_all(lambda body: _leave(server, body), bodies[: args.clients], args.clients)
    left = wait_until_idle(server)
    after = send(server, bodies[:1], 1)
    return [
        Check("summaries", len(load.answers)),
        Check("failures", load.answers.count(None) + alone.answers.count(None), "==", 0),
        Check("answers unlike those alone", sum(a != b for a, b in pairs), "==", 0),
        Check("one client: tokens/s", alone.tokens_per_s),
        Check(f"{args.clients} clients: tokens/s", load.tokens_per_s),
        Check("clients over one", load.tokens_per_s / alone.tokens_per_s, ">=", LEAST),
        Check("clients over one, by the server's processor time", gain),
        Check("connections cut in the middle of an answer", sum(cut), "==", len(cut)),
        *(Check(f"{name} after them", left[name], "==", 0) for name in LEFT_BEHIND),
        Check("the next answer is right", after.answers[0] == load.answers[0], "==", 1),
    ]


def send(server: Server, bodies: Sequence[dict[str, Any]], clients: int) -> Round:
    """Send requests by some clients, each with one request at a time."""
    started, busy = time.perf_counter(), server.processor_s()
    answers = run_all(lambda body: _ask(server, body), bodies, clients)
    return Round(answers, time.perf_counter() - started, server.processor_s() - busy)


def run_all(
    call: Callable[[dict[str, Any]], Result], bodies: Sequence[dict[str, Any]], clients: int
) -> list[Result]:
    """Return the results of calls by so many threads, in order."""
    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(call, bodies))


def _ask(server: Server, body: dict[str, Any]) -> Answer | None:
    try:
        return ask(server.base_url, ROUTE, body)
    except WrongAnswerError as error:
        print(error, flush=True)
        return None


def _leave(server: Server, body: dict[str, Any]) -> bool:
    return ask_and_leave(server.base_url, ROUTE, body, EVENTS_READ) == EVENTS_READ


if __name__ == "__main__":
    sys.exit(main())
