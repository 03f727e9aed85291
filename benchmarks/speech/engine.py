"""Measure an engine that hears, in a process of its own.

Run by ``benchmarks.speech``: reads a job from the standard input, and prints figures as JSON.
Clips are transcribed by ``audio.transcriber`` over the engine of a server, without HTTP. Features
are computed before, because both sides get the same ones.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.audio.log_mel import SAMPLE_RATE
from mlx_parallm.audio.recording import Recording, recorded
from mlx_parallm.audio.transcriber import Heard, Task, Transcriber
from mlx_parallm.audio.windows import Thresholds
from mlx_parallm.bench.statistics import percentile
from mlx_parallm.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.process_setup.garbage import spare_garbage_collection
from mlx_parallm.serving.async_engine import AsyncEngine
from mlx_parallm.types.events import ErrorEvent, TokenEvent
from mlx_parallm.types.model_input import ModelInput
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.types.step import TokenLogprob

# TASK: one attempt in a language that is known; random weights would be doubted for ever.
TASK = Task(
    language="en",
    temperatures=(0.0,),
    thresholds=Thresholds(compression_ratio=None, logprob=None, no_speech=None),
)
# WARM_UPS: runs that are not measured.
WARM_UPS = 2
SPEECH, TEXT = "speech", "text"
# PROMPT: tokens of a stream's prompt; STREAM_TOKENS: tokens that it may decode.
PROMPT, STREAM_TOKENS = 100, 6000


@dataclass(frozen=True, slots=True)
class Job:
    """One measurement.

    Attributes:
        parts: names of ``PARTS``.
        model: the speech model's folder.
        clips: the number of recordings in a batch.
        seconds: how long each is, at most a window.
        max_tokens: new tokens of each.
        alone: how many of them are also transcribed one after the other.
        rounds: how often both are repeated.
        text_model: a folder of a model whose streams run beside; empty for none.
        streams: their number.
        quiet_s: for how long streams run without clips, before and after them.
        stall_ms: ``--max-decode-stall-ms``; None: no limit.
        step_tokens: ``--max-num-batched-tokens``; None: that of the device.
        features: a file that gets the features of all clips, for the other side; empty for none.
    """

    parts: tuple[str, ...]
    model: str
    clips: int
    seconds: float
    max_tokens: int
    alone: int = 4
    rounds: int = 1
    text_model: str = ""
    streams: int = 0
    quiet_s: float = 1.0
    stall_ms: float | None = None
    step_tokens: int | None = None
    features: str = ""


@dataclass(slots=True)
class Run:
    """Clips until the last of them was transcribed.

    Attributes:
        wall_s: seconds that it took.
        cpu_s: processor seconds of the process.
        first_s: seconds until every clip had a token: all are encoded by then.
        tokens: of each clip, in order.
    """

    wall_s: float = 0.0
    cpu_s: float = 0.0
    first_s: float = 0.0
    tokens: list[list[int]] = field(default_factory=list[list[int]])

    def figures(self) -> dict[str, float]:
        """Return times and the number of tokens."""
        return {
            "wall_s": self.wall_s,
            "cpu_s": self.cpu_s,
            "first_s": self.first_s,
            "tokens": sum(map(len, self.tokens)),
            "clips": len(self.tokens),
        }


class Bench:
    """The engine, and the clips of a job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        models = [ModelConfig(path=job.model, served_names=(SPEECH,))]
        if job.text_model:
            length = PROMPT + STREAM_TOKENS + 16
            models.append(
                ModelConfig(path=job.text_model, served_names=(TEXT,), max_model_len=length)
            )
        self.engine = AsyncEngine(
            EngineConfig(
                models=tuple(models),
                # Each measurement encodes its clips itself.
                cache=CacheConfig(enable_prefix_caching=False),
                scheduler=SchedulerConfig(
                    max_num_seqs=max(job.clips, job.streams),
                    max_decode_stall_ms=job.stall_ms,
                    max_num_batched_tokens=job.step_tokens,
                ),
            )
        )
        self._ids = itertools.count()
        self.engine.start()
        model = self._model(SPEECH)
        assert model.speech is not None, "the model hears"
        prompt = model.speech.prompt(TASK.language, TASK.name, has_timestamps=False)
        # So a window ends after as many tokens as the job says.
        self._rules = replace(model.speech, max_length=len(prompt) + job.max_tokens)
        started = time.process_time()
        samples = [noise(number, job.seconds) for number in range(job.clips)]
        made = time.process_time()
        self.recordings = [recorded(each, self._rules.num_mels) for each in samples]
        self.features_s = (time.process_time() - made) / job.clips
        self.made_s = made - started
        spare_garbage_collection()

    def _model(self, name: str) -> GenerationModel:
        status = self.engine.find(name)
        assert status is not None
        assert isinstance(status.model, GenerationModel)
        return status.model

    def facts(self) -> dict[str, Any]:
        """Return how the model runs."""
        info = self._model(SPEECH).info
        return {
            "path": info.path,
            "backend": info.attention_backend,
            "compiled": info.is_compiled,
            "runs ahead": info.runs_ahead,
            "device": str(dict(mx.device_info()).get("device_name", "cpu")),
            "features_s": self.features_s,
        }

    async def run(self, recordings: Sequence[Recording]) -> Run:
        """Transcribe recordings side by side."""
        run = Run(tokens=[[] for _ in recordings])
        started, busy = time.perf_counter(), time.process_time()

        async def transcribe(place: int, recording: Recording) -> None:
            async def ask(
                prompt_ids: Sequence[int], source: ModelInput, params: SamplingParams
            ) -> Heard:
                heard, first = await self._ask(prompt_ids, source, params)
                run.first_s = max(run.first_s, first - started)
                run.tokens[place] += heard.token_ids
                return heard

            async for _ in Transcriber(self._rules, recording, TASK, ask).windows():
                pass

        await asyncio.gather(*itertools.starmap(transcribe, enumerate(recordings)))
        run.wall_s, run.cpu_s = time.perf_counter() - started, time.process_time() - busy
        return run

    async def _ask(
        self, prompt_ids: Sequence[int], source: ModelInput, params: SamplingParams
    ) -> tuple[Heard, float]:
        """Return what the model makes of a source, and when its first token came."""
        stream = await self.engine.open_reader(
            GenerateRequest(
                request_id=f"clip-{next(self._ids)}",
                model=SPEECH,
                prompt_ids=tuple(prompt_ids),
                inputs=(source,),
                params=params,
            )
        )
        token_ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        first = 0.0
        async for event in stream:
            if isinstance(event, ErrorEvent):
                raise event.error
            if isinstance(event, TokenEvent):
                first = first or time.perf_counter()
                token_ids += event.token_ids
                logprobs += event.logprobs
        return Heard(tuple(token_ids), tuple(logprobs), len(prompt_ids)), first

    async def follow(self, number: int, times_s: list[float]) -> None:
        """Note when each token of a stream of the text model comes, until it is cancelled."""
        prompt = tuple(1 + (number * PROMPT + place) % 400 for place in range(PROMPT))
        request = GenerateRequest(
            request_id=f"stream-{number}",
            model=TEXT,
            prompt_ids=prompt,
            params=SamplingParams(max_tokens=STREAM_TOKENS, temperature=0.0, ignore_eos=True),
        )
        stream = await self.engine.open_reader(request)
        try:
            async for event in stream:
                if isinstance(event, ErrorEvent):
                    raise event.error
                if isinstance(event, TokenEvent):
                    times_s += [time.perf_counter()] * len(event.token_ids)
        finally:
            await self.engine.abort(request.request_id)


def noise(number: int, seconds: float) -> np.ndarray:
    """Return samples of a recording: noise and a few tones."""
    draw = np.random.RandomState(number)
    times = np.arange(int(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    tones = sum(np.sin(2 * np.pi * hertz * times) for hertz in draw.uniform(80, 4000, 4))
    return (0.05 * tones + 0.05 * draw.standard_normal(len(times))).astype(np.float32)


async def rates(bench: Bench) -> dict[str, Any]:
    """Return rounds of one batch of clips, and of the first of them one after the other."""
    job, recordings = bench.job, bench.recordings
    if job.features:
        sources = [each.features[: 100 * 30] for each in recordings]
        np.save(job.features, np.stack(sources))
    # The first runs compile, and show the engine what steps cost.
    for _ in range(WARM_UPS):
        await bench.run(recordings)
        await bench.run(recordings[:1])
    tokens: list[list[int]] = []
    rounds: list[dict[str, Any]] = []
    for _ in range(job.rounds):
        batch = await bench.run(recordings)
        tokens = batch.tokens
        singles = [await bench.run([each]) for each in recordings[: job.alone]]
        alone = [run.figures() for run in singles]
        rounds.append(
            {
                "batch": batch.figures(),
                "alone": {name: sum(each[name] for each in alone) for name in alone[0]},
                "equal": [
                    run.tokens[0] == tokens
                    for run, tokens in zip(singles, batch.tokens, strict=False)
                ],
            }
        )
    return {"rounds": rounds, "tokens": tokens}


async def beside(bench: Bench) -> dict[str, Any]:
    """Return the gaps of streams of a text model alone, and while clips are transcribed."""
    job = bench.job
    for _ in range(WARM_UPS - len(job.parts) + 1):
        await bench.run(bench.recordings)
    times_s: list[list[float]] = [[] for _ in range(job.streams)]
    streams = [
        asyncio.create_task(bench.follow(number, times)) for number, times in enumerate(times_s)
    ]
    rounds: list[dict[str, Any]] = []
    await asyncio.sleep(job.quiet_s)
    try:
        for _ in range(job.rounds):
            begin = time.perf_counter()
            await asyncio.sleep(job.quiet_s)
            middle = time.perf_counter()
            run = await bench.run(bench.recordings)
            end = time.perf_counter()
            rounds.append(
                {
                    "alone": gaps(times_s, begin, middle),
                    "beside": gaps(times_s, middle, end),
                    "clips": run.figures(),
                }
            )
            ended = [stream for stream in streams if stream.done()]
            assert not ended, "a stream ended before the clips did"
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return {"rounds": rounds}


def gaps(times_s: Sequence[Sequence[float]], begin: float, end: float) -> dict[str, float]:
    """Return milliseconds between the tokens of streams within a time, and tokens a second."""
    all_ms: list[float] = []
    for times in times_s:
        within = [each for each in times if begin <= each <= end]
        all_ms += [1e3 * (after - before) for before, after in itertools.pairwise(within)]
    return {
        "p50_ms": percentile(all_ms, 50),
        "p99_ms": percentile(all_ms, 99),
        "most_ms": max(all_ms),
        "mean_ms": statistics.fmean(all_ms),
        "tokens_per_s": (len(all_ms) + len(times_s)) / (end - begin),
    }


PARTS: dict[str, Callable[[Bench], Awaitable[dict[str, Any]]]] = {"rates": rates, "beside": beside}


async def measure(job: Job) -> dict[str, Any]:
    """Return the figures of a job's parts by their names; print them after each part."""
    started = time.perf_counter()
    bench = Bench(job)
    figures: dict[str, Any] = {"engine": bench.facts() | {"start_s": time.perf_counter() - started}}
    try:
        for part in job.parts:
            figures[part] = await PARTS[part](bench)
            print(json.dumps(figures), flush=True)
    finally:
        bench.engine.stop()
    return figures


def main() -> None:
    content = json.loads(sys.stdin.read())
    asyncio.run(measure(Job(**content | {"parts": tuple(content["parts"])})))


if __name__ == "__main__":
    main()
