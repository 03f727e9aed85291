"""Measure streams beside long prompts: one server, one that has prompts computed, and two replicas.

``python -m benchmarks.gpu.pair`` needs two GPUs. Streams of a random model decode in a closed loop
while prompts arrive at regular times. Three set-ups take turns under the same load:

- ``one``: a server on the first GPU does both.
- ``pair``: a server on the first GPU decodes, and has one on the second GPU compute long prompts.
- ``replicas``: a server on each GPU gets every other stream and prompt.

``--shrink`` runs it at a size for a CPU, to see that it runs.
"""

from __future__ import annotations

import asyncio
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.adapter_swap import model_config
from benchmarks.checks import Check, conclude
from benchmarks.fairness import gaps_within
from benchmarks.kv_disk_server import metric
from benchmarks.make_model import make_model
from benchmarks.measure import (
    BenchmarkError,
    completion,
    first_text_ms,
    load_tokenizer,
    make_client,
    text_of_tokens,
    warm_up,
    with_model,
)
from benchmarks.servers import SERVED_NAME, Server, running_server
from mlx_parallm.bench.load import open_loop
from mlx_parallm.bench.record import PlannedRequest, RequestRecord
from mlx_parallm.bench.statistics import percentile

PROMPT_OUTPUT, STREAM_PROMPT = 32, 64
# LEAD_S: seconds of streams before the first prompt, which are not measured.
LEAD_S = 2.0
#: ``SHRUNK``: arguments in place of their defaults with ``--shrink``.
SHRUNK = {
    "shape": "small",
    "prompt_tokens": 1024,
    "streams": 6,
    "stream_tokens": 48,
    "num_prompts": 4,
    "rounds": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The measurements of clients of one set-up, from the first prompt to the end of the last."""

    itl_p99_ms: float
    itl_p50_ms: float
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    prefilled_elsewhere: float = 0.0


#: ``SetUp``: yields the servers of a set-up, and those of them that clients speak to.
SetUp = Callable[[Path, Namespace], Iterator[Sequence[Server]]]


def main() -> int:
    args = make_parser().parse_args()
    if args.shrink:
        vars(args).update(SHRUNK)
    folder = make_model(
        args.folder / args.shape.replace(" ", "-"), config=model_config(args.shape, args.dtype)
    )
    rounds: dict[str, list[Figures]] = {name: [] for name in SET_UPS}
    for number in range(args.rounds):
        for name, set_up in SET_UPS.items():
            with contextmanager(set_up)(folder, args) as servers:
                figures = measured(servers, plan(folder, args, number), args)
            rounds[name].append(figures)
            print(f"{name:<9}{figures}", flush=True)
    details = {name: [asdict(each) for each in figures] for name, figures in rounds.items()}
    return conclude("pair", checks_of(rounds, args.num_prompts), details)


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m benchmarks.gpu.pair",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", default="8B")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--folder", type=Path, default=Path("results/pair"), help="of the model")
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--interval-s", type=float, default=1.0, help="between two prompts")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--stream-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--shrink", action="store_true", help="a size for a CPU")
    return parser


@contextmanager
def server_on(gpu: int, model: Path, args: Namespace, *options: str) -> Iterator[Server]:
    """Run a server that sees one GPU."""
    length = ["--max-model-len", str(2 * args.prompt_tokens)]
    target = ["mlx_parallm", "serve", "--model", str(model), "--served-model-name", SERVED_NAME]
    env = {"CUDA_VISIBLE_DEVICES": str(gpu)}
    with running_server(
        "mlx_parallm", [*target, *length, *options], SERVED_NAME, env=env
    ) as server:
        yield server


def one(model: Path, args: Namespace) -> Iterator[Sequence[Server]]:
    with server_on(0, model, args) as server:
        yield [server]


def pair(model: Path, args: Namespace) -> Iterator[Sequence[Server]]:
    with server_on(1, model, args, "--kv-serve") as peer:
        flags = (
            "--prefill-peer",
            peer.base_url,
            "--prefill-min-tokens",
            str(args.prompt_tokens // 4),
        )
        with server_on(0, model, args, *flags) as server:
            warm_up(peer, 4)
            yield [server]


def replicas(model: Path, args: Namespace) -> Iterator[Sequence[Server]]:
    with ExitStack() as stack:
        yield [stack.enter_context(server_on(gpu, model, args)) for gpu in range(2)]


SET_UPS: dict[str, SetUp] = {"one": one, "pair": pair, "replicas": replicas}


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of a round: ``streams`` for a closed loop, the rest with their times."""

    streams: Sequence[PlannedRequest]
    prompts: Sequence[PlannedRequest]
    warm_up: Sequence[PlannedRequest]


def plan(folder: Path, args: Namespace, seed: int) -> Load:
    """Return the load of a round; no two prompts begin alike."""
    tokenizer = load_tokenizer(folder)

    def request(kind: str, index: int, length: int, output: int) -> PlannedRequest:
        return completion(
            index, text_of_tokens(tokenizer, length, f"{kind} {seed} {index}"), output
        )

    prompts = [
        replace(
            request("prompt", number, args.prompt_tokens, PROMPT_OUTPUT),
            arrival_s=LEAD_S + number * args.interval_s,
        )
        for number in range(args.num_prompts)
    ]
    streams = [
        request("stream", number, STREAM_PROMPT, args.stream_tokens)
        for number in range(args.streams)
    ]
    # By these a server learns how fast it computes, and its peer sends.
    warm_up = [request("warm-up", number, args.prompt_tokens, 4) for number in range(4)]
    return Load(streams, prompts, warm_up)


def measured(servers: Sequence[Server], load: Load, args: Namespace) -> Figures:
    """Return what clients of servers see; requests go to these in turn."""
    for server in servers:
        warm_up(server, min(8, args.streams))
    asyncio.run(_send_one_by_one(servers, load.warm_up))
    used = _prefilled(servers)
    streams, prompts = asyncio.run(_send(servers, load))
    figures = _figures(streams, prompts)
    return replace(figures, prefilled_elsewhere=_prefilled(servers) - used)


async def _send_one_by_one(servers: Sequence[Server], requests: Sequence[PlannedRequest]) -> None:
    for server in servers:
        for planned in requests:
            await _sent(server, planned)


async def _send(
    servers: Sequence[Server], load: Load
) -> tuple[list[RequestRecord], list[RequestRecord]]:
    """Keep streams running until the prompts are answered; return all records."""
    records: list[RequestRecord] = []

    async def follow(planned: PlannedRequest) -> None:
        while True:
            # A stream that begins anew is measured too, as far as it comes.
            record = RequestRecord(index=planned.index, start_s=time.perf_counter())
            records.append(record)
            await _sent(servers[planned.index % len(servers)], planned, record)

    tasks = [asyncio.create_task(follow(planned)) for planned in load.streams]
    try:
        prompts = await open_loop(
            load.prompts, lambda planned: _sent(servers[planned.index % len(servers)], planned)
        )
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for result in ended:
        if isinstance(result, BenchmarkError):
            raise result
    return records, prompts


async def _sent(
    server: Server, planned: PlannedRequest, record: RequestRecord | None = None
) -> RequestRecord:
    """Send a request; raise ``BenchmarkError`` if it fails."""
    own = record or RequestRecord(index=planned.index, start_s=time.perf_counter())
    body = planned.body | {"ignore_eos": True}
    await make_client(server).send_into(own, with_model(replace(planned, body=body), server.model))
    if own.error is not None:
        raise BenchmarkError(f"a request failed: {own.error}\n{server.log_tail()}")
    return own


def _figures(streams: Sequence[RequestRecord], prompts: Sequence[RequestRecord]) -> Figures:
    """Return the figures from the first prompt's start to the last one's end."""
    span = min(each.start_s for each in prompts), max(each.end_s for each in prompts)
    gaps = [gap for each in streams for gap in gaps_within(each.chunk_times_s, *span)]
    times_s = [at_s for each in (*streams, *prompts) for at_s in each.chunk_times_s]
    first_ms = [first_text_ms(each) for each in prompts]
    return Figures(
        itl_p99_ms=1e3 * percentile(gaps, 99),
        itl_p50_ms=1e3 * percentile(gaps, 50),
        tokens_per_s=sum(span[0] <= at_s <= span[1] for at_s in times_s) / (span[1] - span[0]),
        ttft_p50_ms=percentile(first_ms, 50),
        ttft_p99_ms=percentile(first_ms, 99),
    )


def _prefilled(servers: Sequence[Server]) -> float:
    """Return how many prompts servers had computed elsewhere."""
    return sum(metric(server, "mlx_parallm:prefill_peer_used_total") for server in servers)


def checks_of(rounds: dict[str, list[Figures]], num_prompts: int) -> list[Check]:
    """Return the figures of all rounds; ratios are medians of those of each round."""

    def median(name: str, field: str) -> float:
        return percentile([getattr(each, field) for each in rounds[name]], 50)

    def ratio(field: str, name: str, base: str) -> float:
        return percentile(
            [
                getattr(each, field) / getattr(other, field)
                for each, other in zip(rounds[name], rounds[base], strict=True)
            ],
            50,
        )

    shown: list[tuple[str, str]] = [
        ("ITL p99, ms", "itl_p99_ms"),
        ("output tokens/s", "tokens_per_s"),
        ("TTFT of long prompts p50, ms", "ttft_p50_ms"),
    ]
    used: Any = min(each.prefilled_elsewhere for each in rounds["pair"])
    return [
        Check("pair over one: ITL p99", ratio("itl_p99_ms", "pair", "one"), "<=", 0.6),
        Check("replicas over one: ITL p99", ratio("itl_p99_ms", "replicas", "one")),
        Check("pair over replicas: output tokens/s", ratio("tokens_per_s", "pair", "replicas")),
        Check("share of prompts computed by the peer", used / num_prompts, ">=", 0.9),
        *(
            Check(f"{name}: {what}", median(name, field))
            for what, field in shown
            for name in SET_UPS
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
