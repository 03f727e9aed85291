"""A rank of a small model, as the server's engine process or follower is one, with a fault."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    RanksConfig,
    SchedulerConfig,
)
from mlx_parallm.distributed import facts, following
from mlx_parallm.engine.build import build_models, loading
from mlx_parallm.engine.live_weights import WeightsUpdate
from mlx_parallm.engine.local_life import LocalLife
from mlx_parallm.generation.build import GenerationBuilder
from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.serving.async_engine import AsyncEngine
from mlx_parallm.serving.build import _generator_folders, training_beside, worker_for
from mlx_parallm.serving.kinds import ignore_progress
from mlx_parallm.types.content import package_versions
from mlx_parallm.types.errors import ParallmError
from mlx_parallm.types.events import ErrorEvent, TokenEvent
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.worker.generation.load.loading import GenerationLoader
from mlx_parallm.worker.generation.load.plan import GenerationSpec
from mlx_parallm.worker.ops import DropPrepared, Load, Pending, PrepareWeights, Step
from mlx_parallm.worker.worker import Device, PendingLoad, Tensors, Worker, WorkerModel

NAME = "small"
#: The prompt of the tokens that every world must begin with.
PROMPT = tuple(range(5, 25))
NUM_TOKENS = 24
MAX_LEN = 1024
#: NORM, CUT: a weight that every rank has whole, and one that is cut by its rows.
NORM, CUT = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"

Say = Callable[..., None]


@dataclass(frozen=True)
class Task:
    """Task of a rank; JSON carries it.

    Attributes:
        folder: the model's.
        phase: what rank 0 does once it serves: a function of ``PHASES``.
        fault: what goes wrong on this rank; empty: nothing.
        timeout_s: see ``RanksConfig``.
        join_s: seconds that ranks wait for each other at the start.
        max_num_seqs: a setting.
        bad_folder: weights of which only the last rank's part is bad.
        version: the version of mlx that this rank has; empty: the true one.
    """

    folder: str
    phase: str = "stop"
    fault: str = ""
    timeout_s: float = 30.0
    join_s: float = 30.0
    max_num_seqs: int = 4
    bad_folder: str = ""
    version: str = ""

    def config(self, rank: int, size: int) -> EngineConfig:
        """Return the settings of a rank."""
        return EngineConfig(
            models=(ModelConfig(path=self.folder, served_names=(NAME,), max_model_len=MAX_LEN),),
            cache=CacheConfig(kv_cache_bytes=4 << 20),
            scheduler=SchedulerConfig(
                max_num_seqs=self.max_num_seqs, max_num_batched_tokens=256, max_loras=1
            ),
            ranks=RanksConfig(
                rank=rank,
                size=size,
                backend="ring",
                timeout_s=self.timeout_s,
                join_timeout_s=self.join_s,
            ),
            warm_up=False,
        )


def run_rank(rank: int, size: int, task: Task, say: Say) -> int:
    """Be a rank; return the exit code."""
    if task.version:
        versions = {**package_versions(), "mlx": task.version}
        facts.package_versions = lambda: versions
    try:
        if rank == 0:
            _lead(task, size, say)
        else:
            _follow(task, rank, size, say)
    except ParallmError as problem:
        say(refusal=str(problem))
        return 1
    return 0


def _lead(task: Task, size: int, say: Say) -> None:
    config = task.config(0, size)
    builders = (FaultyBuilder(task.fault, say),)
    life = LocalLife(
        config, ignore_progress, partial(build_models, builders), training_beside, worker_for
    )
    engine = AsyncEngine(config, life=life)
    engine.start()
    try:
        asyncio.run(_serve(engine, task, say))
    finally:
        engine.stop()


def _follow(task: Task, rank: int, size: int, say: Say) -> None:
    config = task.config(rank, size)
    builder = FaultyBuilder(task.fault, say)
    with loading(config, ignore_progress):
        following.follow(config, builder.install, _generator_folders)
    builder.report()


async def _serve(engine: AsyncEngine, task: Task, say: Say) -> None:
    say(tokens=[token async for token in generate(engine, "first", PROMPT, NUM_TOKENS)])
    await PHASES[task.phase](engine, task, say)


async def generate(
    engine: AsyncEngine, name: str, prompt: tuple[int, ...], count: int
) -> AsyncGenerator[int]:
    """Yield the likeliest tokens that follow a prompt."""
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(request_id=name, model=NAME, prompt_ids=prompt, params=params)
    handle = await GENERATION.client(engine).submit(request)
    async for event in handle.events:
        assert not isinstance(event, ErrorEvent), event
        if isinstance(event, TokenEvent):
            for token in event.token_ids:
                yield token


async def stop(engine: AsyncEngine, task: Task, say: Say) -> None:
    """End at once."""
    del engine, task, say


async def idle(engine: AsyncEngine, task: Task, say: Say) -> None:
    """Do nothing for ever."""
    del engine, task
    say(begun=True)
    await asyncio.Event().wait()


async def decode(engine: AsyncEngine, task: Task, say: Say) -> None:
    """Continue a prompt, and say each token."""
    del task
    async for token in generate(engine, "long", PROMPT[::-1], 300):
        say(token=token)


async def slow(engine: AsyncEngine, task: Task, say: Say) -> None:
    """Continue prompts, until the metrics show that a rank is slow."""
    del task
    skew_s = 0.0
    while skew_s < SLOW_S:
        tokens = [token async for token in generate(engine, "slow", PROMPT, NUM_TOKENS)]
        text, _ = await engine.render_metrics()
        lines = text.decode().splitlines()
        (skew,) = (line for line in lines if line.startswith("mlx_parallm:rank_step_skew_seconds "))
        skew_s = float(skew.split()[-1])
        say(slow_tokens=tokens)


async def prefill(engine: AsyncEngine, task: Task, say: Say) -> None:
    """Compute long prompts for ever."""
    del task
    for number in itertools.count():
        prompt = tuple(5 + (place * (number + 3)) % 91 for place in range(MAX_LEN - 8))
        async for _ in generate(engine, f"prompt {number}", prompt, 1):
            if number == 0:
                say(begun=True)


async def update(engine: AsyncEngine, task: Task, say: Say) -> None:
    """Replace weights for ever."""
    del task
    for number in itertools.count():
        await engine.control.update_weights(WeightsUpdate(tensors={NORM: _norm(1.0 + number)}))
        if number == 0:
            say(begun=True)


async def refused(engine: AsyncEngine, task: Task, say: Say) -> None:
    """Try updates that do not fit, and say what the model is before and after."""
    say(digests=dict(await engine.control.checksums()))
    updates = [WeightsUpdate(tensors=tensors) for tensors in _bad_tensors()]
    updates.append(WeightsUpdate(folder=Path(task.bad_folder)))
    for number in range(NUM_TRIES):
        problems = [await _refusal(engine, update) for update in updates]
        if number == 0:
            say(problems=problems)
    say(version=engine.control.version().label)
    say(digests=dict(await engine.control.checksums()))
    say(tokens=[token async for token in generate(engine, "after", PROMPT, NUM_TOKENS)])


#: Tries of each bad update.
NUM_TRIES = 25


async def _refusal(engine: AsyncEngine, update: WeightsUpdate) -> str:
    try:
        await engine.control.update_weights(update)
    except ParallmError as problem:
        return str(problem)
    return "it was taken"


def _bad_tensors() -> list[dict[str, HostTensor]]:
    """Return updates with a NaN, with another shape, and for which a rank has no memory."""
    last = np.zeros((64, 64), np.float32)
    last[-1] = np.nan
    return [
        {NORM: _norm(2.0), CUT: HostTensor(last)},
        {NORM: _norm(2.0), CUT: HostTensor(np.zeros((3, 64), np.float32))},
        {NORM: _norm(NO_MEMORY)},
    ]


def _norm(value: float) -> HostTensor:
    return HostTensor(np.full(64, value, np.float32))


PHASES: dict[str, Callable[[AsyncEngine, Task, Say], Awaitable[None]]] = {
    each.__name__: each for each in (stop, idle, decode, slow, prefill, update, refused)
}

#: The first step that fails: all before are of the load and of the first tokens.
FAILING_STEP = 40
#: The value of a norm for which a faulty rank has no memory.
NO_MEMORY = 3.0


def allocate_too_much() -> None:
    """Fail to allocate: MLX would end the process on a CPU, and raise on a GPU, as NumPy does."""
    np.empty(1 << 50, np.uint8)


class FaultyBuilder(GenerationBuilder):
    """Loads models of which something goes wrong."""

    def __init__(self, fault: str, say: Say) -> None:
        self._fault = fault
        self._say = say
        self._memory: list[int] = []

    def install(self, worker: Worker) -> None:
        """See ``KindBuilder``."""
        loader = GenerationLoader(ranks=worker.ranks)
        worker.install(GenerationSpec, FaultyLoader(loader, self._fault, self._memory))

    def report(self) -> None:
        """Say how much memory was in use after each update that was dropped."""
        if self._memory:
            self._say(memory=self._memory)


@dataclass
class FaultyLoader:
    """Implements ``Loader``."""

    loader: GenerationLoader
    fault: str
    memory: list[int]

    def begin(self, op: Load, device: Device) -> PendingLoad:
        """See ``Loader``."""
        return FaultyLoad(self.loader.begin(op, device), self)


class FaultyLoad:
    """Implements ``PendingLoad``."""

    num_bytes = 0
    num_stages = 1

    def __init__(self, pending: PendingLoad, faulty: FaultyLoader) -> None:
        self._pending = pending
        self._faulty = faulty

    @property
    def model(self) -> WorkerModel | None:
        """See ``PendingLoad``."""
        model = self._pending.model
        return None if model is None else FaultyModel(model, self._faulty)

    def advance(self) -> None:
        """See ``Pending``."""

    def wait(self) -> Any:
        """See ``Pending``."""
        return self._pending.wait()


class FaultyModel:
    """Implements ``WorkerModel``."""

    def __init__(self, model: WorkerModel, faulty: FaultyLoader) -> None:
        self._model = model
        self._fault = faulty.fault
        self._memory = faulty.memory
        self._num_steps = 0

    def begin(self, op: Any, tensors: Mapping[str, Tensors]) -> Pending[Any]:
        """See ``WorkerModel``."""
        match op:
            case Step():
                self._num_steps += 1
                self._before_step()
            case PrepareWeights(handle=str(handle)) if self._fault == "no memory to prepare":
                if tensors[handle][NORM].array[0] == NO_MEMORY:
                    allocate_too_much()
        pending = self._model.begin(op, tensors)
        if isinstance(op, DropPrepared):
            self._memory.append(mx.get_active_memory())
        return pending

    def recover(self) -> None:
        """See ``WorkerModel``."""
        self._model.recover()

    def release(self) -> None:
        """See ``WorkerModel``."""
        self._model.release()

    def _before_step(self) -> None:
        if self._fault == "slow":
            sleep(SLOW_S)
        if self._num_steps < FAILING_STEP:
            return
        if self._fault == "exception":
            raise RuntimeError("a step fails")
        if self._fault == "no memory":
            allocate_too_much()


#: Seconds by which a slow rank's steps are longer: ten times a step of the small model.
SLOW_S = 0.02
