"""The loop of sampling, scoring, training and uploading, in turn or overlapped."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from random import Random

from examples.grpo.policies import Policy
from examples.grpo.rollouts import Collected, collect, evaluate
from examples.grpo.task import problems
from mlx_parallm.client import RLClient


@dataclass(slots=True, kw_only=True)
class Step:
    """The figures of a step.

    Attributes:
        step: its number.
        versions: labels of the weights that sampled, in order of their updates.
        reward: mean reward of the samples.
        evaluation: mean reward of greedy answers to held-out problems; None in most steps.
        mismatch: see ``Trainer.update``; of a session, how far its first mean ratio is from 1.
        rollout_s: seconds spent waiting for samples.
        train_s: seconds of training.
        update_s: seconds until the server uses the new weights.
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


class Loop:
    """A training run; ``options`` are those of the command line."""

    def __init__(self, client: RLClient, policy: Policy, options: argparse.Namespace) -> None:
        self._client = client
        self._policy = policy
        self._options = options
        self._random = Random(options.seed)
        self._held_out = problems(Random(0), options.eval_problems, held_out=True)
        # The versions of all updates so far.
        self._versions: list[str] = []
        self._began_s = time.monotonic()

    async def steps(self) -> AsyncIterator[Step]:
        """Yield each step when it has ended."""
        await self._publish()
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
        measured = await self._policy.update(collected.samples)
        trained_s = time.monotonic()
        await self._publish()
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

    def _sample(self, number: int) -> asyncio.Task[Collected]:
        """Start sampling for a step."""
        options = self._options
        rollout = collect(
            self._client,
            problems(self._random, options.problems),
            adapter=options.adapter,
            group_size=options.group_size,
            seed=options.seed + number * options.problems * options.group_size,
            reward_model=options.reward_model,
        )
        return asyncio.create_task(rollout)

    async def _evaluate(self, number: int) -> float | None:
        options = self._options
        if number % options.eval_every and number != options.steps - 1:
            return None
        return await evaluate(self._client, self._held_out, adapter=options.adapter)

    async def _publish(self) -> None:
        """Serve the policy's weights, with which the server then samples."""
        # The server refuses them if another client has changed the policy.
        expected_version = self._versions[-1] if self._versions else None
        info = await self._policy.publish(str(len(self._versions)), expected_version)
        self._versions.append(info.version)
