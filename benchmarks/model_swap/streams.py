"""Streams of one model while another one is loaded, used and unloaded."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import statistics
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from benchmarks.adapter_swap import model_config
from benchmarks.checks import Check
from benchmarks.fairness import gaps_within
from benchmarks.make_model import CONFIG, make_model
from benchmarks.measure import (
    BenchmarkError,
    completion,
    load_tokenizer,
    make_client,
    text_of_tokens,
)
from benchmarks.model_swap.http import Answer, complete, load, unload
from benchmarks.servers import Server, mlx_parallm_server
from mlx_parallm.bench.client import LoadClient
from mlx_parallm.bench.record import PlannedRequest, RequestRecord
from mlx_parallm.demo_models.folders import DEMO_FOLDER

PROMPT_TOKENS = 64
STREAM_TOKENS = 400
USED_TOKENS = 16
SWAPPED = "swapped"
# LEAD_S: seconds of decoding before the first measurement.
LEAD_S = 3.0
# MOST_FIRST, MOST_LATER: the longest gap of a stream beside the first load, and beside later ones,
# over the longest without. LEAST_RATE: tokens per second of the server's processor time over those
# without: other programs of the machine count for seconds of the clock.
MOST_FIRST, MOST_LATER, LEAST_RATE, MOST_RESIDENT = 3.0, 2.0, 0.95, 1.03
# MOST_GAP_MS, MOST_READ, MOST_SECOND: targets on a GPU: a gap, and the first and the second load
# over the time that it takes to read the files.
MOST_GAP_MS, MOST_READ, MOST_SECOND = 100.0, 1.3, 1.1
#: ``TWENTY_MILLION``: the shape of a model of 22 million parameters.
TWENTY_MILLION = CONFIG | {
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
}
READ_BYTES = 16 << 20
# GPU_OPTIONS: room for both models and the KV that they may want; by default there is room for the
# models of the start.
GPU_OPTIONS = ("--memory", "60GiB", "--max-model-len", "1024", "--max-num-seqs", "64")


@dataclass(frozen=True, slots=True)
class Moment:
    """A time by the client's clock, and the processor time of the server until then, in seconds."""

    at_s: float
    processor_s: float

    @classmethod
    def now(cls, server: Server) -> Moment:
        """Return this moment."""
        return cls(time.perf_counter(), server.processor_s())


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of time in which streams ran.

    Attributes:
        longest_ms: the longest gap between two tokens of a stream.
        tokens_per_s: tokens of all streams, and of the other model.
        tokens_per_processor_s: the same by the processor time of the server.
    """

    longest_ms: float
    tokens_per_s: float
    tokens_per_processor_s: float

    @classmethod
    def of(
        cls, streams: Sequence[Sequence[float]], begin: Moment, end: Moment, other_tokens: int = 0
    ) -> Window:
        """Return the figures from ``begin`` to ``end``.

        Args:
            streams: the times of each stream's tokens, on the same clock.
            begin: the begin.
            end: the end.
            other_tokens: tokens of another model in this time.
        """
        gaps = [gap for times in streams for gap in gaps_within(times, begin.at_s, end.at_s)]
        count = sum(begin.at_s < at <= end.at_s for times in streams for at in times)
        count += other_tokens
        return cls(
            longest_ms=1e3 * max(gaps, default=0.0),
            tokens_per_s=count / (end.at_s - begin.at_s),
            tokens_per_processor_s=count / (end.processor_s - begin.processor_s),
        )


@dataclass(frozen=True, slots=True)
class Round:
    """Streams alone, and then beside a model that comes and goes.

    Attributes:
        alone: the window before the load.
        beside: the window that begins with the load.
        load_s: the seconds of the load.
        unload_s: the seconds of the unload.
        resident_bytes: memory of the server's process after it.
    """

    alone: Window
    beside: Window
    load_s: float
    unload_s: float
    resident_bytes: int


@dataclass(slots=True)
class Streams:
    """Streams of which each is followed by another one when it ends.

    Attributes:
        records: of all streams so far.
    """

    client: LoadClient
    prompts: Sequence[PlannedRequest]
    records: list[RequestRecord] = field(default_factory=list[RequestRecord])

    @property
    def times_s(self) -> list[list[float]]:
        """Return the times of each stream's tokens."""
        return [list(record.chunk_times_s) for record in self.records]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run them within the block; raise BenchmarkError if one fails."""
        tasks = [asyncio.create_task(self._follow(prompt)) for prompt in self.prompts]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, BenchmarkError):
                raise result

    async def _follow(self, prompt: PlannedRequest) -> None:
        # The first ends early, at another token for each, so that contexts of all lengths run.
        first = 1 + STREAM_TOKENS * (1 + prompt.index) // (1 + len(self.prompts))
        lengths = itertools.chain([first], itertools.repeat(STREAM_TOKENS))
        for length in lengths:
            record = RequestRecord(index=prompt.index, start_s=time.perf_counter())
            self.records.append(record)
            planned = replace(prompt, body=prompt.body | {"max_tokens": length})
            await self.client.send_into(record, planned)
            if record.error is not None:
                raise BenchmarkError(f"a stream failed: {record.error}")


def streams_part(args: Namespace) -> tuple[list[Check], dict[str, Any]]:
    """Measure streams of the embedded model beside one of 22 million parameters."""
    swapped = make_model(args.folder / "twenty-million", seed=1, config=TWENTY_MILLION)
    rounds = _measured(None, DEMO_FOLDER, swapped, args)
    checks = streams_checks(rounds)
    return checks, {"rounds": [asdict(each) for each in rounds]}


def gpu_part(args: Namespace) -> tuple[list[Check], dict[str, Any]]:
    """Measure streams of Qwen3-0.6B's shape beside a model of the 8B shape."""
    shapes = [args.gpu_shapes[0], args.gpu_shapes[1]]
    folders = [
        make_model(args.folder / shape, config=model_config(shape, "bfloat16")) for shape in shapes
    ]
    mx.clear_cache()
    read_s = seconds_to_read(folders[1])
    rounds = _measured(folders[0], folders[0], folders[1], args, GPU_OPTIONS)
    checks = gpu_checks(rounds, read_s)
    return checks, {"rounds": [asdict(each) for each in rounds], "read_s": read_s}


def _measured(
    model: Path | None,
    tokens: Path,
    swapped: Path,
    args: Namespace,
    options: Sequence[str] = (),
) -> list[Round]:
    """Return the rounds of streams of one model beside another; ``tokens`` has the tokenizer."""
    roots = ("--allowed-model-roots", str(args.folder.resolve()))
    options = [*options, *roots, *args.server_options.split()]
    tokenizer = load_tokenizer(tokens)
    with mlx_parallm_server(model, options) as server:
        prompts = [
            completion(
                number,
                text_of_tokens(tokenizer, PROMPT_TOKENS, number),
                STREAM_TOKENS,
                model=server.model,
                ignore_eos=True,
            )
            for number in range(args.streams)
        ]
        streams = Streams(make_client(server), prompts)
        return asyncio.run(_rounds(server, streams, swapped.resolve(), args))


async def _rounds(server: Server, streams: Streams, swapped: Path, args: Namespace) -> list[Round]:
    rounds: list[Round] = []
    async with streams.running():
        await asyncio.sleep(LEAD_S)
        for number in range(args.rounds):
            if args.gpu:
                forget_cached(swapped)
            rounds.append(await _round(server, streams, swapped, args.seconds))
            print(f"round {number + 1} of {args.rounds}: {rounds[-1]}", flush=True)
    return rounds


async def _round(server: Server, streams: Streams, swapped: Path, seconds: float) -> Round:
    before = Moment.now(server)
    await asyncio.sleep(seconds)
    begin = Moment.now(server)
    load_s = await asyncio.to_thread(load, server, str(swapped), name=SWAPPED)
    body = {"model": SWAPPED, "prompt": "a b c", "max_tokens": USED_TOKENS, "temperature": 0}
    answer: Answer = await asyncio.to_thread(complete, server, body)
    if answer.error is not None:
        raise BenchmarkError(f"the loaded model failed: {answer.error}\n{server.log_tail()}")
    unload_s = time.perf_counter()
    await asyncio.to_thread(unload, server, SWAPPED)
    unload_s = time.perf_counter() - unload_s
    await asyncio.sleep(max(0.0, begin.at_s + seconds - time.perf_counter()))
    end = Moment.now(server)
    return Round(
        alone=Window.of(streams.times_s, before, begin),
        beside=Window.of(streams.times_s, begin, end, USED_TOKENS),
        load_s=load_s,
        unload_s=unload_s,
        resident_bytes=server.resident_bytes(),
    )


def streams_checks(rounds: Sequence[Round]) -> list[Check]:
    """Return the figures of rounds, the first of which checks how the model runs."""
    alone = max(each.alone.longest_ms for each in rounds)
    first, later = rounds[0], rounds[1:]
    longest = max((each.beside.longest_ms for each in later), default=float("nan"))
    rate = statistics.median(each.beside.tokens_per_s / each.alone.tokens_per_s for each in rounds)
    by_processor = statistics.median(
        each.beside.tokens_per_processor_s / each.alone.tokens_per_processor_s for each in rounds
    )
    loads = [each.load_s for each in later] or [float("nan")]
    return [
        Check("longest gap of a stream without a load, ms", alone),
        Check("first load, s", first.load_s),
        Check("later loads, s: median", statistics.median(loads)),
        Check("unloads, s: median", statistics.median(each.unload_s for each in rounds)),
        Check("longest gap: first load, ms", first.beside.longest_ms),
        Check("longest gap: later loads, ms", longest),
        Check(
            "longest gap beside the first load over that without one",
            first.beside.longest_ms / alone,
            "<=",
            MOST_FIRST,
        ),
        Check(
            "longest gap beside later loads over that without one",
            longest / alone,
            "<=",
            MOST_LATER,
        ),
        Check("tokens/s beside loads over those without: median", rate),
        Check(
            "tokens per second of the processor, beside loads over without: median",
            by_processor,
            ">=",
            LEAST_RATE,
        ),
        Check(
            "resident memory after the last round over that after the first",
            rounds[-1].resident_bytes / first.resident_bytes,
            "<=",
            MOST_RESIDENT,
        ),
    ]


def gpu_checks(rounds: Sequence[Round], read_s: float) -> list[Check]:
    """Return the figures of rounds on a GPU; the files are read in ``read_s``."""
    alone, longest = (
        max(getattr(each, name).longest_ms for each in rounds) for name in ("alone", "beside")
    )
    later = statistics.median([each.load_s for each in rounds[1:]] or [float("nan")])
    return [
        Check("seconds to read the files", read_s),
        Check("longest gap of a stream without a load, ms", alone),
        Check("longest gap of a stream beside a load, ms", longest, "<=", MOST_GAP_MS),
        Check("first load, s", rounds[0].load_s),
        Check("later loads, s: median", later),
        Check("first load over reading the files", rounds[0].load_s / read_s, "<=", MOST_READ),
        Check("later loads over reading the files", later / read_s, "<=", MOST_SECOND),
    ]


def seconds_to_read(folder: Path) -> float:
    """Return the seconds in which a program reads the files of weights from the disk."""
    forget_cached(folder)
    buffer = bytearray(READ_BYTES)
    begin_s = time.perf_counter()
    for path in folder.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - begin_s


def forget_cached(folder: Path) -> None:
    """Let the system forget what it keeps of a folder's files, where it can."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            # What is not on the disk yet stays.
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
