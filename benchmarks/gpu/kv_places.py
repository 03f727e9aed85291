"""Time to the first token of prompts whose KV comes back from host memory and from a disk.

    python -m benchmarks.gpu.kv_places --folder FOLDER

An engine in this process computes prompts that its pool cannot hold together. Then each is asked
for again, alone and beside streams that decode. Before that the pool is emptied, so that all of a
prompt comes from the store. The engine reads here although computing may be faster; the last rows
say what it does when it chooses. On a CPU: ``--shape small --prompts 4 --length 1024 --streams 4
--room 1024``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from benchmarks.checks import Check, conclude
from benchmarks.gpu.engines import BenchEngine, engine_for, random_prompts
from mlx_parallm.generation.kv_cache.disk.reader import NUM_READERS
from mlx_parallm.generation.kv_cache.disk.store import DiskStore
from mlx_parallm.generation.kv_cache.fetches import UnitPace
from mlx_parallm.generation.kv_cache.host_store import HostStore
from mlx_parallm.generation.kv_cache.stores import BlockStore
from mlx_parallm.types.events import ErrorEvent, TokenEvent
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.worker.device.properties import backend_name
from tests.builders.random_models import RandomModel, random_model

GB = 1e9
# OWNER: digest of the model that the files belong to; any will do.
OWNER = "be"
STREAM_TOKENS = 512
# HOST_BYTES: 24 prompts of 8,192 tokens of the shape 8B.
HOST_BYTES = 30 << 30
# QUIET_S: seconds without a new block after which a disk store has written all.
QUIET_S = 1.5
# POLL_S: how long to wait for a store that does not call.
POLL_S = 0.05
# READ_BYTES: of one plain read of a file.
READ_BYTES = 8 << 20
# MAX_READ_BYTES: how much is read to measure a disk.
MAX_READ_BYTES = 8 << 30
# BACK_SHARE: least share of a prompt that a store must return.
BACK_SHARE = 0.9


class UnknownPace(UnitPace):
    """Never says how long computing takes, so that no read is given up for it."""

    def predict(self, count: float) -> float | None:
        """Return None."""
        del count
        return None


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt until its first token.

    Attributes:
        seconds: the time.
        stored_tokens: its tokens whose KV a store returned.
        stream_tokens: tokens of the streams meanwhile.
        steps_ms: times of the steps.
    """

    seconds: float
    stored_tokens: int
    stream_tokens: int
    steps_ms: list[float]


class Driver:
    """Steps an engine that has stores, as the engine's loop does."""

    def __init__(self, bench: BenchEngine) -> None:
        self.bench = bench
        self._engine = bench.engine
        assert bench.kv.tiers is not None
        self.tiers = bench.kv.tiers
        self._arrived = threading.Event()
        self._engine.wake_by(self._arrived.set)
        self._streams: list[str] = []
        self._count = 0

    def add(self, prompt: Sequence[int], max_tokens: int | None = None) -> str:
        """Add a request and return its id; without ``max_tokens`` it does not end."""
        self._count += 1
        request_id = f"bench-{self._count}"
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._engine.submit(
            GenerateRequest(
                request_id=request_id, model="bench", prompt_ids=tuple(prompt), params=params
            )
        )
        return request_id

    def step(self) -> dict[str, int]:
        """Run one step, or wait for a store; return the new tokens by request."""
        self._arrived.clear()
        events = self._engine.step()
        if events is None:
            self._arrived.wait(POLL_S)
            return {}
        counts: dict[str, int] = {}
        for event in events:
            if isinstance(event, ErrorEvent):
                raise event.error
            if isinstance(event, TokenEvent):
                counts[event.request_id] = counts.get(event.request_id, 0) + len(event.token_ids)
        return counts

    def settle(self) -> None:
        """Step until stores have got all blocks and, where they write them, have written them."""
        changed_s, written = time.monotonic(), -1
        while True:
            stats = self.tiers.stats()
            is_on_disk = any(tier.tier == "disk" for tier in stats.tiers)
            now_written = sum(tier.store.written_blocks for tier in stats.tiers)
            if now_written != written or stats.num_unsaved or self._engine.has_work():
                changed_s, written = time.monotonic(), now_written
            elif not is_on_disk or time.monotonic() - changed_s > QUIET_S:
                return
            self.step()

    def first_token(self, prompt: Sequence[int]) -> Turn:
        """Ask for one token after a prompt, and step until it is there."""
        hits, steps, tokens = self._stored_tokens(), list[float](), 0
        started = time.perf_counter()
        request_id = self.add(prompt, max_tokens=1)
        while True:
            begun = time.perf_counter()
            counts = self.step()
            steps.append(1e3 * (time.perf_counter() - begun))
            tokens += sum(count for each, count in counts.items() if each != request_id)
            if request_id in counts:
                seconds = time.perf_counter() - started
                return Turn(seconds, self._stored_tokens() - hits, tokens, steps)

    def returns(self, prompt: Sequence[int]) -> Turn:
        """Ask for a prompt of which the pool has nothing."""
        self._engine.reset_cache(reset_external=False)
        return self.first_token(prompt)

    def _stored_tokens(self) -> int:
        stats = self.tiers.stats()
        return sum(tier.hit_tokens for tier in stats.tiers)

    @contextmanager
    def streams(self, prompts: Sequence[Sequence[int]]) -> Iterator[None]:
        """Keep requests decoding while the block runs."""
        ids = [self.add(prompt) for prompt in prompts]
        waiting = set(ids)
        while waiting:
            waiting -= self.step().keys()
        try:
            yield
        finally:
            for request_id in ids:
                self._engine.abort(request_id)
            while self._engine.has_work():
                self.step()

    def decode(self, steps: int) -> Turn:
        """Let the streams decode alone."""
        times, tokens = list[float](), 0
        started = time.perf_counter()
        for _ in range(steps):
            begun = time.perf_counter()
            tokens += sum(self.step().values())
            times.append(1e3 * (time.perf_counter() - begun))
        return Turn(time.perf_counter() - started, 0, tokens, times)

    def decode_while_saving(self) -> Turn:
        """Let the streams decode until all blocks that ended sequences left are saved."""
        times, tokens = list[float](), 0
        started = time.perf_counter()
        while self.tiers.stats().num_unsaved:
            begun = time.perf_counter()
            tokens += sum(self.step().values())
            times.append(1e3 * (time.perf_counter() - begun))
        return Turn(time.perf_counter() - started, 0, tokens, times)


def main() -> int:
    args = make_parser().parse_args()
    dtype = mx.float32 if backend_name() == "cpu" else mx.bfloat16
    model = random_model(args.shape, dtype=dtype)
    checks: list[Check] = []
    details: dict[str, Any] = {"device": str(dict(mx.device_info()).get("device_name", "?"))}
    for place in args.places:
        folder = Path(tempfile.mkdtemp(prefix="kv-places-", dir=args.folder))
        try:
            measured, record = measure(model, place, folder, args)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        checks += measured
        details[place] = record
    return conclude("kv_places", checks, details)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.kv_places",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", default="8B")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--length", type=int, default=8192, help="tokens of a prompt")
    parser.add_argument("--pool", type=int, default=3, help="prompts that the pool holds")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--room", type=int, default=2048, help="tokens that a stream may decode")
    parser.add_argument("--steps", type=int, default=60, help="of the streams alone")
    parser.add_argument("--beside", type=int, default=6, help="prompts beside the streams")
    parser.add_argument("--places", nargs="+", default=["host", "disk"], choices=["host", "disk"])
    parser.add_argument("--folder", type=Path, help="parent of the disk store's folder")
    return parser


def measure(
    model: RandomModel, place: str, folder: Path, args: argparse.Namespace
) -> tuple[list[Check], dict[str, Any]]:
    """Return a place's figures, and what they are made of."""
    num_streams = args.streams * (STREAM_TOKENS + args.room)
    with engine_for(
        model,
        max_num_seqs=args.streams + 1,
        max_model_len=args.length + STREAM_TOKENS + args.room,
        kv_tokens=args.pool * args.length + num_streams,
        stores=[make_store(place, folder)],
        host_bytes=HOST_BYTES if place == "host" and backend_name() == "cuda" else 0,
    ) as (bench, _):
        driver = Driver(bench)
        pace, driver.tiers.fetches.computing = driver.tiers.fetches.computing, UnknownPace()
        run = PlaceRun(driver, model, place, folder, args)
        try:
            run.alone()
            run.beside()
            if place == "disk":
                run.plain_reads()
            driver.tiers.fetches.computing = pace
            run.as_chosen()
        finally:
            bench.engine.close()
        return run.checks(), run.record | {"engine": bench.facts()}


def make_store(place: str, folder: Path) -> BlockStore:
    """Return a store that has room for all."""
    if place == "host":
        return HostStore(HOST_BYTES)
    return DiskStore(folder, OWNER, int(0.9 * shutil.disk_usage(folder).free))


class PlaceRun:
    """The measurements of one place."""

    def __init__(
        self,
        driver: Driver,
        model: RandomModel,
        place: str,
        folder: Path,
        args: argparse.Namespace,
    ) -> None:
        self._driver = driver
        self._place = place
        self._folder = folder
        self._args = args
        lengths = [args.length] * (args.prompts + 2 * args.beside + 2)
        prompts = random_prompts(model, lengths)
        self._prompts, self._others = prompts[: args.prompts], prompts[args.prompts :]
        self._streams = random_prompts(model, [STREAM_TOKENS] * args.streams, seed=1)
        self._turns: dict[str, list[Turn]] = {}
        self.rates: dict[str, float] = {}

    @property
    def record(self) -> dict[str, Any]:
        """Return what the figures are made of."""
        turns = {name: [asdict(turn) for turn in each] for name, each in self._turns.items()}
        stats = self._driver.tiers.stats()
        preemptions = self._driver.bench.engine.stats.num_preemptions
        return {
            "turns": turns,
            "rates": self.rates,
            "stats": asdict(stats),
            "preemptions": preemptions,
        }

    def alone(self) -> None:
        """Compute all prompts, and have them come back, with nothing beside."""
        driver = self._driver
        for prompt in self._others[:2]:
            # These compile what is needed.
            driver.first_token(prompt)
            driver.settle()
            driver.returns(prompt)
        turns: list[Turn] = []
        begun = time.perf_counter()
        for prompt in self._prompts:
            turns.append(driver.first_token(prompt))
            driver.settle()
        print(f"{self._place}: computed and saved in {time.perf_counter() - begun:.1f} s")
        self._note("computed", turns)
        if self._place == "disk":
            self._note("came back, uncached", [self._uncached(each) for each in self._prompts])
        self._note("came back", [driver.returns(prompt) for prompt in self._prompts])

    def _uncached(self, prompt: Sequence[int]) -> Turn:
        drop_page_cache(self._folder)
        return self._driver.returns(prompt)

    def beside(self) -> None:
        """Have prompts come back, be computed and be saved beside streams."""
        driver, count = self._driver, self._args.beside
        with driver.streams(self._streams):
            driver.decode(8)
            self._note("streams alone", [driver.decode(self._args.steps)])
            again = self._prompts[:count]
            if self._place == "disk":
                drop_page_cache(self._folder)
            self._note("came back beside", [driver.returns(prompt) for prompt in again])
            computed: list[Turn] = []
            saved: list[Turn] = []
            for prompt in self._others[2 : 2 + count]:
                computed.append(driver.first_token(prompt))
                saved.append(driver.decode_while_saving())
            self._note("computed beside", computed)
            self._note("saved beside", saved)
            self._note("streams alone again", [driver.decode(self._args.steps)])
        driver.settle()

    def plain_reads(self) -> None:
        """Measure plain reads of the store's files."""
        for name, threads in (("one thread", 1), (f"{NUM_READERS} threads", NUM_READERS)):
            drop_page_cache(self._folder)
            self.rates[f"uncached, {name}"] = read_rate(self._folder, threads)
            self.rates[f"page cache, {name}"] = read_rate(self._folder, threads)
        print({name: f"{rate / GB:.2f} GB/s" for name, rate in self.rates.items()}, flush=True)

    def as_chosen(self) -> None:
        """Let the engine choose between reading and computing, once it knows both times."""
        driver, turns = self._driver, list[Turn]()
        for prompt in self._others[2 + self._args.beside :]:
            driver.first_token(prompt)
            driver.settle()
        for prompt in self._prompts[: self._args.beside]:
            if self._place == "disk":
                drop_page_cache(self._folder)
            driver.bench.engine.reset_cache(reset_external=False)
            turns.append(driver.first_token(prompt))
            driver.settle()
        self._note("as the engine chooses", turns)

    def checks(self) -> list[Check]:
        """Return the figures."""
        computed = self._median("computed")
        back = self._median("came back")
        bytes_each = self._args.length * self._driver.bench.bytes_per_token
        place = self._place
        checks = [
            Check(f"{place}: KV of a prompt, GB", bytes_each / GB),
            Check(f"{place}: least share that came back", self._least_share(), ">=", BACK_SHARE),
            Check(f"{place}: TTFT computed, ms", 1e3 * computed),
        ]
        if place == "host":
            checks += [
                Check("host: TTFT, ms", 1e3 * back),
                Check("host: TTFT over computed", back / computed, "<=", 0.1),
            ]
        else:
            checks += self._disk_checks(computed, back, bytes_each)
        return [*checks, *self._beside_checks()]

    def _disk_checks(self, computed: float, cached: float, bytes_each: float) -> list[Check]:
        checks: list[Check] = []
        for name, kind, seconds in (
            ("disk", "uncached", self._median("came back, uncached")),
            ("disk, page cache", "page cache", cached),
        ):
            rate = max(rate for each, rate in self.rates.items() if each.startswith(kind))
            ratio = seconds / computed
            share = self._least_share() * bytes_each / seconds / rate
            # One of the two is asked for. What did not come back was computed.
            is_fast = ratio <= 0.3
            checks += [
                Check(f"{name}: TTFT, ms", 1e3 * seconds),
                Check(f"{name}: TTFT over computed", ratio, "<=", 0.3 if is_fast else None),
                Check(f"{name}: plain read, GB/s", rate / GB),
                Check(f"{name}: share of the plain read", share, ">=", None if is_fast else 0.7),
            ]
        return checks

    def _beside_checks(self) -> list[Check]:
        alone = [*self._turns["streams alone"], *self._turns["streams alone again"]]
        rate, place = stream_rate(alone), self._place
        step = statistics.median(ms for turn in alone for ms in turn.steps_ms)
        rows = [Check(f"{place}: streams alone, tokens/s", rate)]
        for name, limit in (
            ("came back beside", 0.9),
            ("saved beside", 0.9),
            ("computed beside", None),
        ):
            turns = self._turns[name]
            longest = max(ms for turn in turns for ms in turn.steps_ms)
            rows += [
                Check(
                    f"{place}: tokens/s while {name}, over alone",
                    stream_rate(turns) / rate,
                    ">=",
                    limit,
                ),
                Check(f"{place}: longest step while {name}, in steps alone", longest / step),
            ]
        ttft = self._median("came back beside"), self._median("computed beside")
        chosen = self._turns["as the engine chooses"]
        tokens = statistics.median(turn.stored_tokens for turn in chosen)
        return [
            *rows,
            Check(f"{place}: TTFT beside streams, ms", 1e3 * ttft[0]),
            Check(f"{place}: TTFT computed beside streams, ms", 1e3 * ttft[1]),
            Check(f"{place}: as chosen, TTFT, ms", 1e3 * self._median("as the engine chooses")),
            Check(f"{place}: as chosen, tokens that came back", tokens),
        ]

    def _least_share(self) -> float:
        came = [turns for name, turns in self._turns.items() if name.startswith("came")]
        return min(turn.stored_tokens for turns in came for turn in turns) / self._args.length

    def _median(self, name: str) -> float:
        return statistics.median(turn.seconds for turn in self._turns[name])

    def _note(self, name: str, turns: list[Turn]) -> None:
        self._turns[name] = turns
        seconds = self._median(name)
        print(f"{self._place}: {name}: {1e3 * seconds:.0f} ms, {len(turns)} times", flush=True)


def stream_rate(turns: Sequence[Turn]) -> float:
    """Return the streams' tokens per second."""
    return sum(turn.stream_tokens for turn in turns) / sum(turn.seconds for turn in turns)


def drop_page_cache(folder: Path) -> None:
    """Write all files of a folder to their disk, and have the system forget them."""
    for path in store_files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_rate(folder: Path, threads: int) -> float:
    """Return the bytes per second of plain reads of the files in a folder."""
    files = store_files(folder)
    sizes = [path.stat().st_size for path in files]
    chosen = [path for number, path in enumerate(files) if sum(sizes[:number]) < MAX_READ_BYTES]
    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        num_bytes = sum(pool.map(_read, chosen))
    return num_bytes / (time.perf_counter() - started)


def _read(path: Path) -> int:
    buffer, total = bytearray(READ_BYTES), 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            total += count
    return total


def store_files(folder: Path) -> list[Path]:
    """Return the files of blocks in a folder."""
    return sorted(path for path in folder.rglob("*.kv*") if path.is_file())


if __name__ == "__main__":
    sys.exit(main())
