"""The loop of sampling, scoring, training and uploading, in turn or overlapped."""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import TypeVar

import mlx.core as mx

from examples.grpo.rollouts import Collected, collect, evaluate
from examples.grpo.task import problems
from examples.grpo.trainer import Trainer, TrainingSample
from mlx_parallm.client import RLClient

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Step:
    """The figures of a step.

    Attributes:
        step: its number.
        versions: labels of the weights that sampled, in order of their updates.
        reward: mean reward of the samples.
        evaluation: mean reward of greedy answers to held-out problems; None in most steps.
        mismatch: see ``Trainer.update``.
        rollout_s: seconds spent waiting for samples.
        train_s: seconds of training.
        update_s: seconds of the upload, until the server uses the new weights.
        elapsed_s: seconds from the start of the loop until the samples had arrived.
    """

    step: int
    versions: list[str]
    reward: float
    evaluation: float | None
    mismatch: float | None
    rollout_s: float
    train_s: float
    update_s: float
    elapsed_s: float


class TrainerThread:
    """Runs a trainer on a thread beside the event loop; MLX requires that it is always the same."""

    def __init__(self, make: Callable[[], Trainer]) -> None:
        self._executor = ThreadPoolExecutor(1)
        self._trainer = self._executor.submit(make)

    async def call(self, action: Callable[[Trainer], T]) -> T:
        """Run an action with the trainer and return its result."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: action(self._trainer.result()))

    def close(self) -> None:
        """Drop the trainer and end the thread."""
        del self._trainer
        # MLX aborts a process that exits with streams of a thread that has ended.
        self._executor.submit(gc.collect)
        self._executor.submit(mx.clear_streams)
        self._executor.shutdown()


class Loop:
    """A training run; ``options`` are those of the command line."""

    def __init__(
        self, client: RLClient, trainer: TrainerThread, options: argparse.Namespace
    ) -> None:
        self._client = client
        self._trainer = trainer
        self._options = options
        self._random = Random(options.seed)
        self._held_out = problems(Random(0), options.eval_problems, held_out=True)
        # The versions of all updates so far.
        self._versions: list[str] = []
        self._began_s = time.monotonic()

    async def steps(self) -> AsyncIterator[Step]:
        """Yield each step when it has ended."""
        await self._upload()
        samples = self._sample(0)
        try:
            for number in range(self._options.steps):
                if number:
                    samples = samples if self._options.in_flight else self._sample(number)
                evaluation = await self._evaluate(number)
                waits_s = time.monotonic()
                collected = await samples
                sampled_s = time.monotonic()
                if self._options.in_flight and number + 1 < self._options.steps:
                    # The update happens during these samples, so later tokens use the new weights.
                    samples = self._sample(number + 1)
                yield await self._step(number, collected, evaluation, waits_s, sampled_s)
        finally:
            samples.cancel()

    async def _step(
        self,
        number: int,
        collected: Collected,
        evaluation: float | None,
        waits_s: float,
        sampled_s: float,
    ) -> Step:
        """Train on samples and upload the new weights."""
        versions = sorted(collected.versions, key=self._versions.index)
        lag = 1 if self._options.in_flight else 0
        if versions[0] not in self._versions[-1 - lag :]:
            raise RuntimeError(f"sampled by {versions}, and the policy is {self._versions[-1]!r}")
        measured = await self._train(collected.samples)
        trained_s = time.monotonic()
        await self._upload()
        return Step(
            step=number,
            versions=versions,
            reward=collected.mean_reward,
            evaluation=evaluation,
            mismatch=measured.get("mismatch"),
            rollout_s=sampled_s - waits_s,
            train_s=trained_s - sampled_s,
            update_s=time.monotonic() - trained_s,
            elapsed_s=sampled_s - self._began_s,
        )

    async def _train(self, samples: list[TrainingSample]) -> dict[str, float]:
        if self._options.sleep:
            await self._client.sleep(1)
        try:
            return await self._trainer.call(lambda trainer: trainer.update(samples))
        finally:
            if self._options.sleep:
                await self._client.wake_up()

    def _sample(self, number: int) -> asyncio.Task[Collected]:
        """Start sampling for a step."""
        options = self._options
        rollout = collect(
            self._client,
            problems(self._random, options.problems),
            adapter=options.adapter,
            group_size=options.group_size,
            seed=options.seed + number * options.problems * options.group_size,
        )
        return asyncio.create_task(rollout)

    async def _evaluate(self, number: int) -> float | None:
        options = self._options
        if number % options.eval_every and number != options.steps - 1:
            return None
        return await evaluate(self._client, self._held_out, adapter=options.adapter)

    async def _upload(self) -> None:
        """Upload the trainer's weights, with which the server then samples."""
        tensors, config = await self._trainer.call(Trainer.adapter)
        info = await self._client.update_adapter(
            self._options.adapter,
            tensors,
            config,
            version=str(len(self._versions)),
            # The server refuses the upload if another client has changed the policy.
            expected_version=self._versions[-1] if self._versions else None,
        )
        self._versions.append(info.version)
