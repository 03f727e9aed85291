"""The parts of ``benchmarks.kv_disk`` with load: streams beside moves of blocks, short prompts."""

from __future__ import annotations

import asyncio
import random
import statistics
import threading
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.checks import Check
from benchmarks.fairness import gaps_within
from benchmarks.kv_disk_server import BLOCK_SIZE, disk_server, metric, random_ids
from benchmarks.measure import BenchmarkError, make_client, send_all, with_model
from benchmarks.servers import Server
from mlx_parallm.bench.record import PlannedRequest, RequestRecord
from mlx_parallm.bench.statistics import percentile
from mlx_parallm.generation.kv_cache.disk.catalog import owner_of
from mlx_parallm.generation.kv_cache.disk.format import FIXED_BYTES, header_size, unpack_header

# KV_BYTES: of a block of the embedded model: 6 layers, 2 heads of 64, keys and values in float32.
KV_BYTES = 6 * 2 * 64 * 2 * 4 * BLOCK_SIZE

# STREAM_PROMPT_TOKENS: so few that a stream's begin takes little of a step.
STREAM_PROMPT_TOKENS, STREAM_TOKENS = 16, 400
# LONG_PROMPTS: how many take turns; the pool holds one and the streams.
LONG_PROMPTS, ROUNDS = 4, 3
# LEAD_S: seconds in which streams begin. ALONE_S: in which they are measured alone.
LEAD_S, ALONE_S = 3.0, 5.0
# AFTER_S: seconds after each long prompt, in which its blocks are saved.
AFTER_S = 2.0

# RECURRING: prompts that come again when neither the pool nor the disk has them any more.
RECURRING, POOL_BLOCKS, DISK_BYTES = 48, 600, 32 << 20
CONCURRENCY, SLICE = 8, 40
# WATCH_S: how often the folder is looked at; files live longer.
WATCH_S = 0.1

Window = tuple[float, float]


@dataclass(slots=True)
class StreamRun:
    """Streams of one server, and what happened beside them, in seconds of the client's clock."""

    records: list[RequestRecord] = field(default_factory=list[RequestRecord])
    windows: dict[str, list[Window]] = field(default_factory=dict[str, list[Window]])

    def note(self, name: str, begin_s: float, end_s: float) -> None:
        """Note when something happened."""
        self.windows.setdefault(name, []).append((begin_s, end_s))

    def gaps_ms(self, name: str) -> list[list[float]]:
        """Return the streams' gaps that overlap each window of a name."""
        return [
            [
                1e3 * gap
                for record in self.records
                for gap in gaps_within(record.chunk_times_s, *window)
            ]
            for window in self.windows.get(name, [])
        ]

    def p99_ms(self, name: str) -> float:
        """Return the 99th percentile of the gaps in all windows of a name."""
        return percentile([gap for gaps in self.gaps_ms(name) for gap in gaps], 99)

    def pause_ms(self, name: str) -> float:
        """Return the longest gap in a window of a name; a quarter of the windows have less.

        What else the machine does makes gaps longer, never shorter.
        """
        return percentile([max(gaps, default=0.0) for gaps in self.gaps_ms(name)], 25)


def streams_part(args: Namespace, folder: Path) -> tuple[list[Check], dict[str, Any]]:
    """Compare the streams' gaps while long prompts are evicted and come back."""
    tokens = args.num_streams * (STREAM_PROMPT_TOKENS + STREAM_TOKENS) + 1.75 * args.prompt_tokens
    pool = int(tokens) // BLOCK_SIZE * KV_BYTES
    options = ["--kv-cache-memory-bytes", str(pool)]
    runs: list[tuple[StreamRun, StreamRun]] = []
    with disk_server(None, options) as off, disk_server(folder, options) as on:
        for number in range(args.repetitions):
            seed = 1000 * (number + 1)
            order = (off, on) if number % 2 else (on, off)
            done = {each.base_url: asyncio.run(streams_run(each, args, seed)) for each in order}
            runs.append((done[off.base_url], done[on.base_url]))
    return streams_checks(runs), {"runs": [figures(run) for pair in runs for run in pair]}


async def streams_run(server: Server, args: Namespace, seed: int) -> StreamRun:
    """Send long prompts, each several times, beside streams."""
    run, client, is_over = StreamRun(), make_client(server), asyncio.Event()

    async def stream(number: int) -> None:
        turn = 0
        # They end one after the other.
        count = STREAM_TOKENS * (number + 1) // args.num_streams
        while not is_over.is_set():
            prompt = random_ids(STREAM_PROMPT_TOKENS, seed + 100_000 * turn + number + 10)
            planned = completion_of_ids(number, prompt, STREAM_TOKENS if turn else count)
            record = RequestRecord(index=number, start_s=time.perf_counter())
            run.records.append(record)
            await client.send_into(record, with_model(planned, server.model))
            turn += 1

    async def alone() -> None:
        begin_s = time.perf_counter()
        await asyncio.sleep(ALONE_S)
        run.note("alone", begin_s, time.perf_counter())

    async def long_prompt(number: int) -> None:
        planned = completion_of_ids(number, random_ids(args.prompt_tokens, seed + number), 4)
        record = await client.send(with_model(planned, server.model))
        name = "computed" if record.cached_tokens < args.prompt_tokens / 2 else "came back"
        seconds = record.end_s - record.start_s
        print(f"{name}: {record.cached_tokens} tokens cached, {seconds:.2f} s", flush=True)
        run.note(name, record.start_s, record.end_s)
        await asyncio.sleep(AFTER_S)
        run.note(f"after it {name}", record.end_s, time.perf_counter())
        record = await client.send(with_model(planned, server.model))
        run.note("from memory", record.start_s, record.end_s)

    tasks = [asyncio.create_task(stream(number)) for number in range(args.num_streams)]
    await asyncio.sleep(LEAD_S)
    await alone()
    begin_s = time.perf_counter()
    for turn in range(ROUNDS):
        for number in range(LONG_PROMPTS):
            await long_prompt(number)
        if turn == 0:
            run.note("first round", begin_s, time.perf_counter())
    run.note("all rounds", begin_s, time.perf_counter())
    await alone()
    is_over.set()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    failed = [record.error for record in run.records if record.error is not None]
    if failed:
        raise BenchmarkError(f"a stream failed: {failed[0]}\n{server.log_tail()}")
    return run


def figures(run: StreamRun) -> dict[str, Any]:
    """Return the figures of a run, for the record."""
    return {
        name: {
            "windows": len(run.windows[name]),
            "p99 ms": run.p99_ms(name),
            "longest ms": [max(gaps, default=0.0) for gaps in run.gaps_ms(name)],
        }
        for name in run.windows
    }


def streams_checks(runs: Sequence[tuple[StreamRun, StreamRun]]) -> list[Check]:
    """Return medians over the runs without and with a store."""

    def ratio(name: str) -> float:
        return statistics.median(on.p99_ms(name) / off.p99_ms(name) for off, on in runs)

    def steps(name: str) -> float:
        return statistics.median(on.pause_ms(name) / step_ms(on) for _, on in runs)

    def step_ms(run: StreamRun) -> float:
        return statistics.median(gap for gaps in run.gaps_ms("alone") for gap in gaps)

    return [
        Check("streams: step alone, ms", statistics.median(step_ms(on) for _, on in runs)),
        Check(
            "streams: ITL p99 without a store, ms",
            statistics.median(off.p99_ms("all rounds") for off, _ in runs),
        ),
        Check("streams: ITL p99 over that without a store", ratio("all rounds"), "<=", 1.15),
        Check("streams: the same where all prompts are new", ratio("first round"), "<=", 1.15),
        Check("streams: longest pause alone, in steps", steps("alone")),
        Check("streams: longest pause while a prompt is computed, in steps", steps("computed")),
        Check("streams: longest pause at a hit in memory, in steps", steps("from memory")),
        Check(
            "streams: longest pause while a prompt comes back, in steps",
            steps("came back"),
            "<=",
            2.0,
        ),
        Check(
            "streams: longest pause while blocks are saved, in steps",
            steps("after it computed"),
            "<=",
            2.0,
        ),
        Check(
            "streams: prompts that came back",
            sum(len(on.windows.get("came back", [])) for _, on in runs),
            "==",
            len(runs) * (ROUNDS - 1) * LONG_PROMPTS,
        ),
    ]


def completion_of_ids(index: int, prompt: Sequence[int], max_tokens: int) -> PlannedRequest:
    """Return a streamed completion of token ids; every token is a chunk with text."""
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return PlannedRequest(index=index, route="/v1/completions", body=body, max_tokens=max_tokens)


def traffic_part(args: Namespace, folder: Path) -> tuple[list[Check], dict[str, Any]]:
    """Compare the throughput of short prompts while the store is at its limit."""
    options = ["--kv-cache-memory-bytes", str(POOL_BLOCKS * KV_BYTES)]
    limited = [*options, "--kv-disk-bytes", str(DISK_BYTES)]
    times: list[dict[str, tuple[float, float]]] = []
    with disk_server(None, options) as off, disk_server(folder, limited) as on:
        with watched(folder) as watch:
            source = traffic()
            for number in range(-2 * RECURRING // SLICE, args.num_requests // SLICE):
                requests = [next(source) for _ in range(SLICE)]
                order = (off, on) if number % 2 else (on, off)
                measured = {each.base_url: timed(each, requests) for each in order}
                if number >= 0:
                    times.append(measured)
        used = metric(on, "mlx_parallm:kv_tier_used_bytes")
        read = metric(on, "mlx_parallm:kv_tier_read_blocks_total")
    without, with_store = ([each[url] for each in times] for url in (off.base_url, on.base_url))
    wall, used_s = ([a[i] / b[i] for a, b in zip(without, with_store, strict=True)] for i in (0, 1))
    writes = watch.writes.values()
    return [
        Check("traffic: requests", SLICE * len(times)),
        Check(
            "traffic: requests/s without a store",
            SLICE * len(times) / sum(each[0] for each in without),
        ),
        Check("traffic: requests/s over without", statistics.median(wall), ">=", 0.97),
        Check(
            "traffic: requests per processor second over without",
            sum(each[1] for each in without) / sum(each[1] for each in with_store),
            ">=",
            0.97,
        ),
        Check("traffic: share of the limit that is used", used / DISK_BYTES, "<=", 1.0),
        Check(
            "traffic: most bytes in the folder over the limit",
            watch.most_bytes / DISK_BYTES,
            "<=",
            1.0,
        ),
        Check("traffic: blocks that were read", read),
        Check("traffic: most times that a block was written", max(writes, default=0), "<=", 3),
        Check("traffic: files that were written", watch.num_files),
    ], {"seconds": [list(each.values()) for each in times], "processor ratios": used_s}


def traffic() -> Iterator[PlannedRequest]:
    """Yield short prompts: every other one has come before, and its blocks are saved."""
    draw = random.Random(7)
    recurring = [
        (random_ids(draw.randint(272, 400), 10_000 + number), draw.randint(4, 16))
        for number in range(RECURRING)
    ]
    index = 0
    while True:
        yield completion_of_ids(index % SLICE, *recurring[index // 2 % RECURRING])
        new = random_ids(draw.randint(20, 200), 20_000 + index)
        yield completion_of_ids((index + 1) % SLICE, new, draw.randint(4, 16))
        index += 2


def timed(server: Server, requests: Sequence[PlannedRequest]) -> tuple[float, float]:
    """Return the seconds, and the processor seconds of the server, that requests take."""
    used_s, started = server.processor_s(), time.perf_counter()
    send_all(server, requests, CONCURRENCY)
    return time.perf_counter() - started, server.processor_s() - used_s


class Watch:
    """Counts the files in which each block was written.

    Attributes:
        writes: number of files by content.
        num_files: how many files there were.
        most_bytes: most bytes of all files at once.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: set[str] = set()
        self.writes: Counter[bytes] = Counter()
        self.num_files = self.most_bytes = 0

    def look(self) -> None:
        """Count files that are new."""
        num_bytes = 0
        for path in self._folder.rglob("*"):
            try:
                num_bytes += path.stat().st_size if path.is_file() else 0
                if owner_of(path.name) and path.name not in self._seen:
                    self._count(path)
            except FileNotFoundError:
                continue
        self.most_bytes = max(self.most_bytes, num_bytes)

    def _count(self, path: Path) -> None:
        with path.open("rb") as file:
            fixed = file.read(FIXED_BYTES)
            packed = fixed + file.read(header_size(fixed) - FIXED_BYTES)
            header = unpack_header(packed, owner_of(path.name), path.stat().st_size)
        self._seen.add(path.name)
        self.num_files += 1
        self.writes.update(header.contents())


@contextmanager
def watched(folder: Path) -> Iterator[Watch]:
    """Look at the files of a folder while the block runs."""
    watch, is_over = Watch(folder), threading.Event()

    def work() -> None:
        while not is_over.wait(WATCH_S):
            watch.look()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield watch
    finally:
        is_over.set()
        thread.join()
