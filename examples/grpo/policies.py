"""The policy that a loop trains: a LoRA of this program, or a training session of the server."""

from __future__ import annotations

import argparse
import asyncio
import gc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any, Protocol, TypeVar, Unpack

import mlx.core as mx

from examples.grpo.trainer import BETAS, Settings, Trainer, TrainingSample, minibatches
from mlx_parallm.client import AdapterInfo, GradientStep, RLClient, TrainingSession
from mlx_parallm.client.mezo import PublishOptions, token_averaged

T = TypeVar("T")


class Policy(Protocol):
    """A policy that is trained and served."""

    async def update(self, samples: Sequence[TrainingSample]) -> dict[str, float]:
        """Train on samples; return figures, as ``Trainer.update`` does."""
        ...

    async def publish(self, version: str, expected_version: str | None) -> AdapterInfo:
        """Serve the policy as it is, unless another version than the expected one is served."""
        ...

    async def close(self) -> None:
        """Release it; what it has published stays."""
        ...


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


class OwnPolicy:
    """A LoRA that this program trains on its own copy of the model, and uploads."""

    def __init__(self, client: RLClient, options: argparse.Namespace, settings: Settings) -> None:
        self._client, self._options = client, options
        self._trainer = TrainerThread(
            lambda: Trainer(Path(options.model), settings, seed=options.seed)
        )

    async def update(self, samples: Sequence[TrainingSample]) -> dict[str, float]:
        """See ``Policy``."""
        if self._options.sleep:
            await self._client.sleep(1)
        try:
            return await self._trainer.call(lambda trainer: trainer.update(samples))
        finally:
            if self._options.sleep:
                await self._client.wake_up()

    async def publish(self, version: str, expected_version: str | None) -> AdapterInfo:
        """See ``Policy``."""
        tensors, config = await self._trainer.call(Trainer.adapter)
        return await self._client.update_adapter(
            self._options.adapter,
            tensors,
            config,
            version=version,
            expected_version=expected_version,
        )

    async def close(self) -> None:
        """See ``Policy``."""
        self._trainer.close()


class ServedPolicy:
    """A session of the server with the objective ``policy``: the server has the only weights."""

    def __init__(
        self,
        client: RLClient,
        session: TrainingSession,
        options: argparse.Namespace,
        settings: Settings,
    ) -> None:
        """Prepare; ``begin`` makes the session."""
        self._client, self._session = client, session
        self._options, self._settings = options, settings
        self._order = Random(options.seed)

    @classmethod
    async def begin(
        cls, client: RLClient, options: argparse.Namespace, settings: Settings
    ) -> ServedPolicy:
        """Begin a session without data, since each step brings its rows."""
        session = await client.training.create(
            options.model,
            {
                "kind": "policy",
                "clip_low": settings.clip,
                "clip_high": settings.clip,
                "kl": settings.kl,
            },
            trainable={"rank": settings.rank, "alpha": settings.rank * settings.scale},
            estimator={
                "kind": "gradient",
                "optimizer": "adam",
                "learning_rate": settings.learning_rate,
                "betas": BETAS,
                "max_grad_norm": settings.max_grad_norm,
            },
            seed=options.seed,
        )
        return cls(client, session, options, settings)

    async def update(self, samples: Sequence[TrainingSample]) -> dict[str, float]:
        """See ``Policy``; each minibatch is a step of the session."""
        steps: list[GradientStep] = []
        for minibatch in minibatches(samples, self._settings, self._order):
            rows = rows_of(minibatch)
            steps += await self._client.training.train_step(self._session.id, batch=rows)
        if not steps:
            return {}
        return {
            "mismatch": abs(steps[0].facts["ratios"] - 1),
            "clipped": sum(step.facts["clipped"] for step in steps) / len(steps),
            "loss": sum(step.loss for step in steps) / len(steps),
        }

    async def publish(self, version: str, expected_version: str | None) -> AdapterInfo:
        """See ``Policy``."""
        options: PublishOptions = {"version": version}
        if expected_version is not None:
            options["expected_version"] = expected_version
        return await publish(self._client, self._session.id, self._options.adapter, **options)

    async def close(self) -> None:
        """See ``Policy``."""
        await self._client.training.delete(self._session.id)


async def publish(
    client: RLClient, session_id: str, name: str, **options: Unpack[PublishOptions]
) -> AdapterInfo:
    """Serve what a session has learnt, in place of an adapter that an earlier run has left."""
    if "expected_version" not in options:
        served = {adapter.name: adapter.version for adapter in await client.adapters()}
        if name in served:
            options["expected_version"] = served[name]
    return await client.training.publish(session_id, name, **options)


def rows_of(samples: Sequence[TrainingSample]) -> list[dict[str, Any]]:
    """Return samples as rows of a session, whose loss is the mean over all their tokens."""
    return token_averaged(
        [
            {
                "token_ids": list(sample.prompt_ids),
                "completion_ids": list(sample.token_ids),
                "logprobs": list(sample.logprobs),
                "advantage": sample.advantage,
            }
            for sample in samples
        ]
    )
