"""Measure an engine with an encoder-decoder, in a process of its own.

Run by ``benchmarks.seq2seq``: reads a job from the standard input, and prints figures as JSON.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from benchmarks.gpu.bench import copy_bandwidth
from benchmarks.gpu.engines import MeasureError
from mlx_parallm.bench.statistics import percentile
from mlx_parallm.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.generation.engine import GenerationEngine
from mlx_parallm.models.decoder_classes import decoder_classes
from mlx_parallm.process_setup.garbage import spare_garbage_collection
from mlx_parallm.serving.build import build_engines
from mlx_parallm.serving.kinds import ignore_progress
from mlx_parallm.types.beams import BeamParams
from mlx_parallm.types.events import ErrorEvent, TokenEvent
from mlx_parallm.types.model_input import source_of
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.worker.device.properties import backend_name
from mlx_parallm.worker.worker import Worker

Tokens = Sequence[int]
# STEPS_APART: steps between the arrivals of two sources.
STEPS_APART = 8


@dataclass(frozen=True, slots=True)
class Job:
    """One measurement.

    Attributes:
        part: a name of ``PARTS``.
        model: the model's folder.
        batch: rows of the largest batch, or streams.
        sources: lengths of the sources, as many as the batch has.
        max_tokens: new tokens of an answer.
        alone: how many of the sources are also translated one after the other.
        arriving: number and length of the sources that arrive beside streams.
        stall_ms: ``--max-decode-stall-ms``; None: no limit.
        beams: width of the search beside streams.
        seed: of the sources.
    """

    part: str
    model: str
    batch: int
    sources: tuple[int, ...]
    max_tokens: int
    alone: int = 4
    arriving: tuple[int, int] = (0, 0)
    stall_ms: float | None = None
    beams: int = 0
    seed: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest source."""
        return max(*self.sources, self.arriving[1], 1)


@dataclass(slots=True)
class Run:
    """Some requests until the last of them ended.

    Attributes:
        wall_s: seconds that it took.
        cpu_s: processor seconds of the process.
        times_s: of the requests, by id, when each token came, in seconds since the start.
        tokens: their tokens, by id.
        ended: ids of the requests that ended, others than these too.
    """

    wall_s: float = 0.0
    cpu_s: float = 0.0
    times_s: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)

    @property
    def first_s(self) -> float:
        """Seconds until every request had a token: all sources are encoded by then."""
        return max(times[0] for times in self.times_s.values())

    @property
    def gaps_ms(self) -> list[float]:
        """Milliseconds between the tokens of a request, of all requests."""
        pairs = itertools.chain(*map(itertools.pairwise, self.times_s.values()))
        return [1e3 * (after - before) for before, after in pairs]

    def figures(self) -> dict[str, float]:
        """Return times and the number of tokens."""
        return {
            "wall_s": self.wall_s,
            "cpu_s": self.cpu_s,
            "first_s": self.first_s,
            "tokens": sum(map(len, self.tokens.values())),
        }


class Bench:
    """An engine with one model, and requests of random sources."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.config = json.loads((Path(job.model) / "config.json").read_text())
        self._draw = random.Random(job.seed)
        self._count = 0
        self.engine = self._build()
        while self.engine.prepare():
            pass
        spare_garbage_collection()

    def _build(self) -> GenerationEngine:
        job = self.job
        rows = job.batch + job.beams
        model = ModelConfig(path=job.model, max_model_len=self.room, max_source_len=job.longest)
        config = EngineConfig(
            models=(model,),
            # Each measurement computes its sources itself.
            cache=CacheConfig(enable_prefix_caching=False),
            scheduler=SchedulerConfig(max_num_seqs=rows, max_decode_stall_ms=job.stall_ms),
            warm_up=backend_name() != "cpu",
        )
        (built,) = build_engines(config, MetricFamilies(), Worker(), ignore_progress)
        if not isinstance(built.engine, GenerationEngine):
            raise MeasureError(f"{job.model} does not generate")
        return built.engine

    @property
    def room(self) -> int:
        """Tokens that a decoder's sequence may have; streams run until a measurement ends."""
        return self.job.max_tokens + 8

    def source(self, length: int) -> list[int]:
        """Return a source of random tokens with its end token."""
        vocabulary = range(3, self.config["vocab_size"])
        return [*self._draw.choices(vocabulary, k=length - 1), self.config["eos_token_id"]]

    def sources(self) -> list[list[int]]:
        """Return new sources of the job's lengths."""
        return [self.source(length) for length in self.job.sources]

    def submit(self, source: Tokens, max_tokens: int, **params: Any) -> str:
        """Begin a greedy request and return its id."""
        self._count += 1
        request_id = str(self._count)
        settings = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **params}
        self.engine.submit(
            GenerateRequest(
                request_id=request_id,
                model="bench",
                prompt_ids=(self.config["decoder_start_token_id"],),
                inputs=(source_of(source),),
                params=SamplingParams(**settings),
            )
        )
        return request_id

    def run(self, sources: Sequence[Tokens], beside: Callable[[Run], None] | None = None) -> Run:
        """Answer sources in one batch; ``beside`` may add other requests after each step."""
        run = Run()
        started, busy = time.perf_counter(), time.process_time()
        for source in sources:
            run.tokens[self.submit(source, self.job.max_tokens)] = []
        run.times_s = {request_id: [] for request_id in run.tokens}
        while not run.ended.issuperset(run.tokens):
            self._step(run, started)
            if beside is not None:
                beside(run)
        run.wall_s, run.cpu_s = time.perf_counter() - started, time.process_time() - busy
        while self.engine.has_work():
            self.engine.step()
        return run

    def _step(self, run: Run, started: float) -> None:
        events = self.engine.step()
        now = time.perf_counter() - started
        if events is None:
            raise MeasureError("no request could run")
        for event in events:
            if isinstance(event, ErrorEvent):
                raise event.error
            if isinstance(event, TokenEvent):
                if event.request_id in run.tokens and event.token_ids:
                    run.tokens[event.request_id] += event.token_ids
                    run.times_s[event.request_id] += [now] * len(event.token_ids)
                if event.finish_reason is not None:
                    run.ended.add(event.request_id)


def rates(bench: Bench) -> dict[str, Any]:
    """Return runs of one batch, and of the first of its sources one after the other."""
    sources = bench.sources()
    # The first runs compile, and show the engine what steps cost.
    for _ in range(1 if backend_name() == "cpu" else 2):
        bench.run(bench.sources())
        bench.run([bench.source(len(sources[0]))])
    batch = bench.run(sources)
    singles = [bench.run([source]) for source in sources[: bench.job.alone]]
    alone = [run.figures() for run in singles]
    tokens = list(batch.tokens.values())
    return {
        "batch": batch.figures(),
        "alone": {name: sum(each[name] for each in alone) for name in alone[0]},
        "equal": [tokens[place] in run.tokens.values() for place, run in enumerate(singles)],
        "sources": sources,
        "tokens": tokens,
        "gap_ms": percentile(batch.gaps_ms, 50),
        **floor(bench),
    }


def floor(bench: Bench) -> dict[str, float]:
    """Return the milliseconds in which a decode step's weights and KV are read at copy speed.

    They are the decoder's weights with the head, and both KVs of all rows in the middle of their
    answers. A weight that several rows share is read once.
    """
    if backend_name() == "cpu":
        return {}
    job, config = bench.job, bench.config
    weights = decoder_bytes(config)
    info = bench.engine.info
    per_token = info.kv_bytes / (info.num_blocks * info.block_size)
    kv = per_token * (sum(job.sources) + len(job.sources) * job.max_tokens / 2)
    rate = copy_bandwidth(1 << 30)
    return {"floor_ms": 1e3 * (weights + kv) / rate, "weight_gb": weights / 1e9, "kv_gb": kv / 1e9}


def decoder_bytes(config: dict[str, Any]) -> int:
    """Return the bytes of the weights that a decode step reads, in two bytes a number."""
    model_class, args_class = decoder_classes(config)
    model: Any = model_class(args_class.from_dict(config))  # type: ignore[attr-defined]
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    projected = ("EncDecAttention.k.", "EncDecAttention.v.")
    projected += ("encoder_attn.k_proj.", "encoder_attn.v_proj.")
    read = (
        weight.size
        for name, weight in weights.items()
        if "encoder." not in name and not any(part in name for part in projected)
    )
    return 2 * sum(read)


def arrivals(bench: Bench) -> dict[str, Any]:
    """Return the gaps of streams alone, and while long sources arrive one after the other."""
    count, length = bench.job.arriving
    # The first run shows the engine what sources of both lengths cost.
    bench.run([*bench.sources(), bench.source(length)])
    alone = bench.run(bench.sources()).gaps_ms
    pending = [bench.source(length) for _ in range(count)]
    steps = itertools.count(1)

    def arrive(_run: Run) -> None:
        if next(steps) % STEPS_APART == 0 and pending:
            bench.submit(pending.pop(), 1)

    beside = bench.run(bench.sources(), arrive).gaps_ms
    if pending:
        raise MeasureError(f"{len(pending)} sources did not arrive before the streams ended")
    return {
        f"{name}_{what}_ms": value
        for name, gaps in (("alone", alone), ("beside", beside))
        for what, value in (
            ("p50", percentile(gaps, 50)),
            ("p99", percentile(gaps, 99)),
            ("most", max(gaps)),
        )
    }


def beams(bench: Bench) -> dict[str, Any]:
    """Return the tokens a second of greedy streams alone, and beside one beam search at a time."""
    job = bench.job
    params = {"beams": BeamParams(width=job.beams)}
    searches: list[str] = []

    def search(run: Run) -> None:
        if not searches or searches[-1] in run.ended:
            searches.append(bench.submit(bench.source(job.sources[0]), job.max_tokens, **params))

    bench.run(bench.sources(), search)
    searches.clear()
    alone = bench.run(bench.sources())
    beside = bench.run(bench.sources(), search)
    return {
        "alone": alone.figures(),
        "beside": beside.figures(),
        "searches": len(searches),
    }


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "rates": rates,
    "arrivals": arrivals,
    "beams": beams,
}


def main() -> None:
    content = json.loads(sys.stdin.read())
    lists = {name: tuple(value) for name, value in content.items() if isinstance(value, list)}
    job = Job(**content | lists)
    bench = Bench(job)
    figures = PARTS[job.part](bench)
    info = bench.engine.info
    facts = {
        "path": info.path,
        "backend": info.attention_backend,
        "compiled": info.is_compiled,
        "runs ahead": info.runs_ahead,
        "device": str(dict(mx.device_info()).get("device_name", "cpu")),
    }
    print(json.dumps(figures | {"engine": facts, "job": asdict(job)}))


if __name__ == "__main__":
    main()
