"""Measure what nginx, HAProxy and SGLang's router cost before two servers of the embedded model.

``python -m benchmarks.scale_out``, after ``make scale-out`` has installed the router. The balancers
run with the files of ``examples/scale-out``. Streams through a balancer and streams to the servers
themselves alternate: first one at a time, for the time to the first byte of an answer's body, then
64 clients at once, for the tokens of both servers in a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.checks import Check, conclude
from benchmarks.measure import BenchmarkError
from mlx_parallm.bench.http_stream import Target, request
from tests.scaleout.balancers import BALANCERS, KEY, Balancer, balancing
from tests.server_process import ServerProcess

MODEL = "mlx-parallm-demo"
FIRST_BYTE_MS, SHARE = 20.0, 0.95


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=50, help="of streams for the first byte")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=3, help="of each client in a round")
    parser.add_argument("--tokens", type=int, default=48, help="of each request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="part of the names of balancers to measure")
    args = parser.parse_args()
    checks: list[Check] = []
    with two_servers() as servers:
        for balancer in chosen(args.only):
            with balancing(balancer, [url.removeprefix("http://") for url in servers]) as url:
                checks += asyncio.run(measure(balancer, servers, url, args))
    if not checks:
        raise BenchmarkError("no balancer is installed")
    return conclude("scale_out", checks, vars(args))


def chosen(only: str) -> list[Balancer]:
    """Return the balancers that are installed, and whose name has this part."""
    return [each for each in BALANCERS if each.is_installed and only in each.name]


@contextlib.contextmanager
def two_servers() -> Iterator[list[str]]:
    """Yield the URLs of two servers."""
    flags = ("--api-key", KEY, "--model", MODEL, "--disable-access-log")
    servers = [ServerProcess(*flags, is_forked=False) for _ in range(2)]
    try:
        for server in servers:
            server.wait_until_ready()
        yield [server.url for server in servers]
    finally:
        for server in servers:
            server.stop()


async def measure(
    balancer: Balancer, servers: Sequence[str], url: str, args: argparse.Namespace
) -> list[Check]:
    """Return what a balancer costs."""
    names = itertools.count()
    through, direct = list[float](), list[float]()
    for number in range(args.pairs):
        through.append(await first_byte_s(url, balancer, next(names)))
        direct.append(await first_byte_s(servers[number % 2], balancer, next(names)))
    later_ms = 1000 * (statistics.median(through) - statistics.median(direct))
    rates: list[tuple[float, float]] = []
    for _ in range(args.rounds):
        balanced = await tokens_per_s([url], balancer, names, args)
        rates.append((balanced, await tokens_per_s(servers, balancer, names, args)))
        print(f"{balancer.name}: {balanced:.0f} of {rates[-1][1]:.0f} tokens/s", flush=True)
    share = statistics.median(balanced / alone for balanced, alone in rates)
    return [
        Check(
            f"{balancer.name}: first byte of a stream later by, ms", later_ms, "<=", FIRST_BYTE_MS
        ),
        Check(f"{balancer.name}: tokens/s", statistics.median(each for each, _ in rates)),
        Check(f"{balancer.name}: tokens/s over those without", share, ">=", SHARE),
    ]


async def first_byte_s(url: str, balancer: Balancer, name: int) -> float:
    """Return the seconds from the request to the first byte of a stream's body."""
    begin_s = time.perf_counter()
    async with request(
        Target.from_url(url), "POST", "/v1/completions", **content(balancer, name, 2)
    ) as response:
        pieces = response.body()
        if response.status != 200 or not await anext(pieces):
            raise BenchmarkError(f"{url} answered {response.status}")
        end_s = time.perf_counter()
        async for _ in pieces:
            pass
    return end_s - begin_s


async def tokens_per_s(
    urls: Sequence[str], balancer: Balancer, names: Iterator[int], args: argparse.Namespace
) -> float:
    """Return the rate of clients that divide themselves evenly among addresses."""

    async def client(url: str, own: Sequence[int]) -> None:
        for name in own:
            fields = content(balancer, name, args.tokens)
            async with request(
                Target.from_url(url), "POST", "/v1/completions", **fields
            ) as response:
                if not (await response.read()).endswith(b"data: [DONE]\n\n"):
                    raise BenchmarkError(f"{url} answered {response.status}")

    begin_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(args.clients):
            own = list(itertools.islice(names, args.requests))
            group.create_task(client(urls[number % len(urls)], own))
    elapsed_s = time.perf_counter() - begin_s
    return args.clients * args.requests * args.tokens / elapsed_s


def content(balancer: Balancer, name: int, max_tokens: int) -> dict[str, Any]:
    """Return body and headers of a stream of a session of its own."""
    body = {"model": MODEL, "prompt": f"{name}, ", "max_tokens": max_tokens, "stream": True}
    headers = {"Authorization": f"Bearer {KEY}", balancer.session_header: f"session-{name}"}
    return {"body": json.dumps(body | {"ignore_eos": True}).encode(), "headers": headers}


if __name__ == "__main__":
    sys.exit(main())
