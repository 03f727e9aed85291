"""The time until an adapter is served by three servers that change together, and what streams wait.

``python -m benchmarks.fan_out`` uploads an adapter of all linear layers to each of three servers
by itself, and then to one of three with ``--peers``, while streams run at all of them.
"""

from __future__ import annotations

import asyncio
import shlex
import statistics
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from tokenizers import Tokenizer

from benchmarks.adapter_swap import (
    PROMPT_TOKENS,
    Swap,
    adapter_body,
    model_config,
    stall_of,
    upload,
    warm_up,
)
from benchmarks.checks import Check, conclude
from benchmarks.make_model import make_model
from benchmarks.measure import (
    BenchmarkError,
    completion,
    load_tokenizer,
    make_client,
    make_parser,
    text_of_tokens,
)
from benchmarks.servers import SERVED_NAME, Server, free_port, mlx_parallm_server
from mlx_parallm.bench.record import PlannedRequest, RequestRecord

COUNT = 3
LEAD_S = 1.0
# FACTOR: of all servers over one, for the time until the adapter is served and for the stalls.
FACTOR = 1.5


@dataclass(frozen=True, slots=True)
class Round:
    """The uploads to some servers, with the gaps of the streams of all in seconds."""

    live_s: list[float]
    transfer_s: float
    stall_s: float


def main() -> int:
    args = parse()
    config = model_config("small", "float32")
    folder = make_model(Path("results/fan-out"), config=config)
    bodies = [adapter_body(config, args.rank, "float32", seed) for seed in range(3)]
    mx.clear_cache()
    rank = ("--max-lora-rank", str(args.rank))
    options = ["--dtype", "float32", *rank, *shlex.split(args.server_options)]
    streams = plan_streams(load_tokenizer(folder), args)
    with running(folder, options, with_peers=False) as servers:
        alone = asyncio.run(run(servers, streams, bodies, range(COUNT)))
    with running(folder, options, with_peers=True) as servers:
        together = asyncio.run(run(servers, streams, bodies, [1] * COUNT))
    live_s = statistics.median(together.live_s)
    bound_s = FACTOR * max(alone.live_s) + alone.transfer_s
    checks = [
        Check("size of the adapter, MB", len(bodies[0]) / 1e6),
        Check("one server by itself, slowest: seconds until it serves", max(alone.live_s)),
        Check("transfer to one server, s", alone.transfer_s),
        Check("longest gap of a stream meanwhile, s: one server's upload", alone.stall_s),
        Check("all servers, median: seconds until all serve", live_s, "<=", bound_s),
        Check(
            "longest gap of a stream meanwhile, s: all servers",
            together.stall_s,
            "<=",
            FACTOR * alone.stall_s,
        ),
    ]
    settings = {name: str(value) for name, value in vars(args).items()}
    return conclude("fan_out", checks, {"settings": settings})


def parse() -> Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--streams", type=int, default=4, help="at each server")
    parser.add_argument("--stream-tokens", type=int, default=1500, help="enough for all uploads")
    return parser.parse_args()


def plan_streams(tokenizer: Tokenizer, args: Namespace) -> list[PlannedRequest]:
    """Return the streams of a server."""
    return [
        completion(
            index,
            text_of_tokens(tokenizer, PROMPT_TOKENS, index),
            args.stream_tokens,
            model=SERVED_NAME,
            ignore_eos=True,
        )
        for index in range(args.streams)
    ]


@contextmanager
def running(folder: Path, options: Sequence[str], *, with_peers: bool) -> Iterator[list[Server]]:
    """Provide three servers, which change together or each by itself."""
    ports = [free_port() for _ in range(COUNT)]
    urls = ",".join(f"http://127.0.0.1:{port}" for port in ports)
    peers = ["--peers", urls] if with_peers else []
    with ExitStack() as stack:
        yield [
            stack.enter_context(mlx_parallm_server(folder, [*options, *peers], port=port))
            for port in ports
        ]


async def run(
    servers: Sequence[Server],
    streams: list[PlannedRequest],
    bodies: Sequence[bytes],
    chosen: Sequence[int],
) -> Round:
    """Upload to the chosen servers, one after another, while streams run at all."""
    for server in servers:
        await warm_up(server, streams)
    clients = [make_client(server) for server in servers]
    tasks = [asyncio.create_task(each.send(stream)) for each in clients for stream in streams]
    swaps: list[Swap] = []
    for number, place in enumerate(chosen):
        await asyncio.sleep(LEAD_S)
        swaps.append(await asyncio.to_thread(upload, servers[place], bodies[number]))
        print(f"upload {number + 1} of {len(chosen)}", flush=True)
    await asyncio.sleep(LEAD_S)
    if any(task.done() for task in tasks):
        raise BenchmarkError("a stream ended before the last upload; raise --stream-tokens")
    records: list[RequestRecord] = [await task for task in tasks]
    stalls = [step * gaps for step, gaps in (stall_of(records, swap) for swap in swaps)]
    return Round(
        live_s=[swap.live_s - swap.sent_s for swap in swaps],
        transfer_s=statistics.median(swap.sent_s - swap.begin_s for swap in swaps),
        stall_s=statistics.median(stalls),
    )


if __name__ == "__main__":
    sys.exit(main())
