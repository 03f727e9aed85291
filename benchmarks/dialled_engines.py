"""Measure the processor time of a token of an engine that is dialled, and of one that is spawned.

``python -m benchmarks.dialled_engines``. The engines compute nothing, so what is left is their
bookkeeping and the way of tokens to the event loop of this process. With ``--model`` two servers of
the embedded model take turns instead, each with two engines.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.checks import Check, conclude
from benchmarks.http_server import CHAT, build
from benchmarks.raw_clients import Clients, json_post
from benchmarks.servers import Server, free_port, mlx_parallm_server
from mlx_parallm.config import EngineConfig
from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.peers.addresses import Address
from mlx_parallm.peers.channel import Channel
from mlx_parallm.peers.child_process import ChildProcess
from mlx_parallm.peers.engines import serve_engines
from mlx_parallm.peers.life import RemoteLife
from mlx_parallm.peers.listener import EngineListener
from mlx_parallm.peers.origins import Dialled, Origin, Spawned
from mlx_parallm.serving.async_engine import AsyncEngine
from mlx_parallm.serving.kinds import ignore_progress
from mlx_parallm.types.request import GenerateRequest, SamplingParams

ENGINES = 2
CLIENTS = 32
# TARGET: largest ratio of the processor time of a token.
TARGET = 1.05
KINDS = ("dialled", "spawned")
PARTS = ("engines", "server", "all")
# COMMAND: starts an engine that computes nothing; the descriptors of its sockets are appended.
COMMAND = [sys.executable, "-m", "benchmarks.dialled_engines", "--descriptors"]

#: Returns the processor time of a token so far, in µs, by part.
Measure = Callable[[], dict[str, float]]


def be_engine(descriptors: Sequence[int]) -> int:
    """Be the process of an engine that computes nothing."""
    ends = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    return serve_engines(Channel(*ends), build, is_elsewhere=len(ends) == 1)


@contextlib.contextmanager
def bare_engines(num_tokens: int) -> Iterator[dict[str, Measure]]:
    """Yield what measures an engine of each kind."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = Address("127.0.0.1", listener.getsockname()[1])
    threading.Thread(target=EngineListener(listener, b"", COMMAND).run, daemon=True).start()
    origins: dict[str, Origin] = {"dialled": Dialled(address, None), "spawned": Spawned(COMMAND)}
    with contextlib.ExitStack() as stack, asyncio.Runner() as loop:
        measures: dict[str, Measure] = {}
        for kind in KINDS:
            before = set(children_of(os.getpid()))
            engine = AsyncEngine(
                EngineConfig(), life=RemoteLife(EngineConfig(), origins[kind], ignore_progress)
            )
            loop.run(start(engine))
            stack.callback(engine.stop)
            (pid,) = set(children_of(os.getpid())) - before
            measures[kind] = partial(bare_token_us, loop, engine, pid, num_tokens)
        yield measures


async def start(engine: AsyncEngine) -> None:
    """Start an engine on the running loop."""
    await asyncio.to_thread(engine.start)


def bare_token_us(
    loop: asyncio.Runner, engine: AsyncEngine, pid: int, num_tokens: int
) -> dict[str, float]:
    """Return the processor time of a token, in µs, by part; the server is this process."""
    begin_s, engine_s = time.process_time(), run_s(pid)
    loop.run(generate(engine, num_tokens))
    spent = {"engines": run_s(pid) - engine_s, "server": time.process_time() - begin_s}
    return per_token(spent, CLIENTS * num_tokens)


async def generate(engine: AsyncEngine, num_tokens: int) -> None:
    """Read so many tokens of each of some streams."""

    async def read(number: int) -> None:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        request = GenerateRequest(
            request_id=str(number), model=CHAT, prompt_ids=(1, 2, 3), params=params
        )
        handle = await GENERATION.client(engine).submit(request)
        async for _ in handle.events:
            pass

    await asyncio.gather(*map(read, range(CLIENTS)))


@contextlib.contextmanager
def servers(num_tokens: int) -> Iterator[dict[str, Measure]]:
    """Yield what measures a server of the embedded model with engines of each kind."""
    address = f"127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as stack:
        target = ["mlx_parallm", "engine", "--listen", address, "--log-level", "warning"]
        listener = stack.enter_context(ChildProcess(target))
        stack.callback(listener.terminate)
        options = {
            "dialled": ["--engine", *[address] * ENGINES],
            "spawned": ["--data-parallel-size", str(ENGINES)],
        }
        measures: dict[str, Measure] = {}
        for kind in KINDS:
            flags = [*options[kind], "--kv-cache-memory-bytes", "128MiB"]
            server = stack.enter_context(mlx_parallm_server(None, flags))
            parent = listener if kind == "dialled" else server.process
            engines = children_of(parent.pid)
            measures[kind] = partial(token_us, server, engines, num_tokens)
        yield measures


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started (Linux)."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def run_s(pid: int) -> float:
    """Return the processor seconds of the threads that a process has (Linux)."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def token_us(server: Server, engines: Sequence[int], num_tokens: int) -> dict[str, float]:
    """Return the processor time of one of the generated tokens, in µs, by part."""
    body = {
        "model": server.model,
        "prompt": "1, 2, 3,",
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    port = urlsplit(server.base_url).port
    assert port is not None
    pids = {"engines": engines, "server": [server.process.pid]}
    clients = Clients(port, CLIENTS, json_post("/v1/completions", body))
    with contextlib.closing(clients):
        clients.answers(CLIENTS)
        before = {part: sum(map(run_s, each)) for part, each in pids.items()}
        clients.answers(2 * CLIENTS)
        spent = {part: sum(map(run_s, each)) - before[part] for part, each in pids.items()}
    return per_token(spent, 2 * CLIENTS * num_tokens)


def per_token(spent_s: Mapping[str, float], num_tokens: int) -> dict[str, float]:
    """Return the µs of a token, by part, and of all parts."""
    return {
        part: 1e6 * seconds / num_tokens
        for part, seconds in (*spent_s.items(), ("all", sum(spent_s.values())))
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="store_true", help="measure servers of a model")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--tokens", type=int, help="of each stream")
    parser.add_argument("--descriptors", type=int, nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.descriptors:
        return be_engine(args.descriptors)
    kinds = servers(args.tokens or 64) if args.model else bare_engines(args.tokens or 200)
    rounds: list[dict[str, dict[str, float]]] = []
    with kinds as measures:
        # The first round warms up.
        for number in range(args.rounds + 1):
            turns = KINDS[:: -1 if number % 2 else 1]
            rounds.append({kind: measures[kind]() for kind in turns})
    details = {"load": os.getloadavg(), "rounds": rounds[1:]}
    name = "dialled_engines_of_a_model" if args.model else "dialled_engines"
    return conclude(name, checks_of(rounds[1:]), details)


def checks_of(rounds: Sequence[dict[str, dict[str, float]]]) -> list[Check]:
    """Return the medians of both kinds, and the medians of their ratios."""
    checks: list[Check] = []
    for part in PARTS:
        for kind in KINDS:
            median = statistics.median(each[kind][part] for each in rounds)
            checks.append(Check(f"{part}, {kind}, us a token", median))
        ratio = statistics.median(each["dialled"][part] / each["spawned"][part] for each in rounds)
        checks.append(Check(f"{part}, ratio", ratio, "<=", TARGET if part == "all" else None))
    return checks


if __name__ == "__main__":
    sys.exit(main())
