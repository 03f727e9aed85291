"""Trainers of steps: the user's, and one that trains the server which serves the policy."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Protocol, cast

from mlx_parallm.art.server import BackendError
from mlx_parallm.art.trajectories import (
    ALL_TURNS,
    Sampled,
    conversations,
    group_advantages,
    sampled_answers,
    teaches,
)
from mlx_parallm.client import GradientStep, RLClient, TrainingSession
from mlx_parallm.client.mezo import token_averaged
from mlx_parallm.client.transport import Transport
from mlx_parallm.types.errors import ConfigError

# SESSION: file of a checkpoint with the session that has written it.
SESSION = "training_session.json"
POLICY = "policy"
# RL_OPTIONS: arguments of ``backend.train`` that a training session has.
RL_OPTIONS = frozenset({"learning_rate", "scale_rewards", "verbose"})
# AUTO_BATCH: conversations of a step of SFT, if the configuration does not say it.
AUTO, AUTO_BATCH = "auto", 16
#: ``Json``: a row or an objective, as the body of a request has it.
Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a policy is served.

    Attributes:
        url: the server's address.
        api_key: the key to it; None: no key is needed.
    """

    url: str
    # Logs of trainers must not show the key.
    api_key: str | None = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """One step of training.

    Attributes:
        kind: "rl" for groups of trajectories with rewards, "sft" for trajectories to imitate.
        model: ART's model.
        data: ART's trajectory groups, or trajectories.
        step: the number of this step.
        previous: the previous step's checkpoint; None before the first step.
        target: an empty folder for the checkpoint: an adapter of PEFT or mlx-lm, or a whole model.
        devices: indices of the devices to train on.
        options: further arguments of ``backend.train``, or the configuration of SFT.
        server: where the policy is served; None if no server runs.
    """

    kind: Literal["rl", "sft"]
    model: Any
    data: Sequence[Any]
    step: int
    previous: Path | None
    target: Path
    devices: tuple[int, ...]
    options: Mapping[str, Any]
    server: ServerAddress | None = None


class Trainer(Protocol):
    """Trains one step and writes its checkpoint."""

    async def __call__(self, job: TrainJob) -> Mapping[str, float]:
        """Return the metrics of the step, such as its loss."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTrainer:
    """Trains in the running server, on its copy of the weights, while it serves.

    A session of ``/v1/training/sessions`` makes the steps, and goes on from one job to the next.
    After a job that failed, or on another server, a new one starts from the previous checkpoint.

    Attributes:
        rank: rank of the LoRA.
        alpha: the LoRA's product is scaled by alpha / rank.
        learning_rate: of RL, unless ``backend.train`` names one; SFT has one of its own.
        minibatch: samples per step of the optimizer.
        clip_low: the policies' ratio counts down to 1 less this.
        clip_high: the ratio counts up to 1 and this.
        kl: weight of the divergence from the policy with which the session began.
        max_grad_norm: gradients are clipped to this norm.
        chat_template_kwargs: those of the agents' requests, for trajectories without the tokens of
            their prompts.
    """

    rank: int = 8
    alpha: float = 16.0
    learning_rate: float = 1e-4
    minibatch: int = 64
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl: float = 0.0
    max_grad_norm: float = 1.0
    chat_template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for settings that no session has."""
        for name in ("rank", "minibatch"):
            count = getattr(self, name)
            if type(count) is not int or count < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, not {count!r}.")
        for name in ("alpha", "max_grad_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a number above 0.")
        for name in ("learning_rate", "clip_low", "clip_high", "kl"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a number of at least 0.")
        if self.clip_low > 1:
            raise ConfigError("clip_low must be at most 1.")

    async def __call__(self, job: TrainJob) -> Mapping[str, float]:
        """Train a step and write its adapter.

        Raises:
            BackendError: no server runs, the data have nothing to learn from, or an option is
                unknown.
        """
        if job.server is None:
            raise BackendError("There is no server to train: register the model first.")
        url, key = job.server.url, job.server.api_key
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(RLClient(url, api_key=key))
            transport = Transport(url, key, timeout_s=None)
            stack.push_async_callback(transport.close)
            step = _ServerStep(self, job, client, transport)
            return await (step.reinforce() if job.kind == "rl" else step.imitate())


class _ServerStep:
    """A job of a ``ServerTrainer``."""

    def __init__(
        self, trainer: ServerTrainer, job: TrainJob, client: RLClient, transport: Transport
    ) -> None:
        self._trainer, self._job = trainer, job
        self._client, self._transport = client, transport
        self._name: str = job.model.name

    async def reinforce(self) -> dict[str, float]:
        """Train on groups with rewards; return the metrics."""
        options, trainer = self._job.options, self._trainer
        unknown = sorted(options.keys() - RL_OPTIONS)
        if unknown:
            raise BackendError(f"ServerTrainer has no option {unknown[0]}; see its attributes.")
        groups = [list(group) for group in self._job.data]
        rewarded = self._rewarded(groups, is_scaled=options.get("scale_rewards", True))
        rows = [await self._row(answer, advantage) for answer, advantage in rewarded]
        objective = {
            "kind": POLICY,
            "clip_low": trainer.clip_low,
            "clip_high": trainer.clip_high,
            "kl": trainer.kl,
        }
        batches = [token_averaged(batch) for batch in _parts(rows, trainer.minibatch)]
        rate = options.get("learning_rate", trainer.learning_rate)
        steps = await self._train(objective, batches, [rate] * len(batches))
        metrics = {
            "reward": fmean(each.reward for group in groups for each in group),
            "samples": float(len(rows)),
        }
        if steps:
            # The first ratio is 1 if the server computes the policy that has sampled.
            metrics["ratio"] = steps[0].facts["ratios"]
            metrics["clipped"] = fmean(step.facts["clipped"] for step in steps)
        return metrics | _means(steps)

    async def imitate(self) -> dict[str, float]:
        """Train on trajectories as they are; return the metrics."""
        config = self._job.options.get("config")
        turns = getattr(config, "assistant_turns", ALL_TURNS)
        rows = [row for each in self._job.data for row in conversations(each, self._name, turns)]
        size: Any = getattr(config, "batch_size", AUTO)
        size = AUTO_BATCH if size == AUTO else size
        if size < 1:
            raise BackendError(f"batch_size must be at least 1, not {size}.")
        batches = _parts(rows, size)
        rate = getattr(config, "learning_rate", self._trainer.learning_rate)
        rates = cast("list[float]", rate) if isinstance(rate, list) else [rate] * len(batches)
        if len(rates) != len(batches):
            raise BackendError(f"There are {len(rates)} learning rates for {len(batches)} batches.")
        # Batches and rates are ART's; what teaches nothing is left out of them.
        taught = [
            (kept, rate)
            for batch, rate in zip(batches, rates, strict=True)
            if (kept := [row for row in batch if teaches(row)])
        ]
        if not taught:
            raise BackendError("No trajectory has an answer that says anything.")
        batches, rates = map(list, zip(*taught, strict=True))
        return _means(await self._train({"kind": "completion"}, batches, rates))

    def _rewarded(
        self, groups: Sequence[Sequence[Any]], *, is_scaled: bool
    ) -> list[tuple[Sampled, float]]:
        """Return the answers of all groups with their advantages; those of 0 teach nothing.

        Raises:
            BackendError: no answer has log-probabilities.
        """
        rewarded: list[tuple[Sampled, float]] = []
        for group in groups:
            rewards = [trajectory.reward for trajectory in group]
            advantages = group_advantages(rewards, is_scaled=is_scaled)
            for trajectory, advantage in zip(group, advantages, strict=True):
                answers = sampled_answers(trajectory, self._name)
                rewarded += [(answer, advantage) for answer in answers]
        if not rewarded:
            raise BackendError(
                "No trajectory has a choice with log-probabilities: put the choices of answers "
                "into messages_and_choices, and request them with logprobs=True."
            )
        return [(answer, advantage) for answer, advantage in rewarded if advantage]

    async def _row(self, answer: Sampled, advantage: float) -> dict[str, Any]:
        """Return an answer as a row; the server writes prompts of which there are messages only."""
        prompt_ids = answer.prompt_ids
        if prompt_ids is None:
            body = {
                "model": self._name,
                "messages": answer.messages,
                "tools": answer.tools,
                "chat_template_kwargs": self._trainer.chat_template_kwargs,
            }
            present = {name: value for name, value in body.items() if value is not None}
            prompt_ids = (await self._transport.ask("POST", "/tokenize", json=present))["tokens"]
        return {
            "token_ids": list(prompt_ids),
            "completion_ids": list(answer.token_ids),
            "logprobs": list(answer.logprobs),
            "advantage": advantage,
        }

    async def _train(
        self, objective: Json, batches: Sequence[Sequence[Json]], rates: Sequence[float]
    ) -> list[GradientStep]:
        """Make a step of the session on each batch, and write its adapter."""
        training, target = self._client.training, self._job.target
        session = await self._session(objective, batches)
        steps: list[GradientStep] = []
        for rows, rate in zip(batches, rates, strict=True):
            steps += await training.train_step(session.id, batch=rows, learning_rate=rate)
        await training.save_adapter(session.id, target)
        written = {"session": session.id, "step": session.step + len(steps)}
        await asyncio.to_thread((target / SESSION).write_text, json.dumps(written))
        return steps

    async def _session(self, objective: Json, batches: Sequence[Sequence[Json]]) -> TrainingSession:
        """Return the session that goes on from the previous checkpoint."""
        known, step = await asyncio.to_thread(_written, self._job.previous)
        sessions = {each.id: each for each in await self._client.training.sessions()}
        session = sessions.get(known)
        if session is not None:
            kind = session.config["objective"]["kind"]
            if (session.status, session.step, kind) == ("ready", step, objective["kind"]):
                return session
            # It was paused, has learnt what is not in the checkpoint, or learns something else.
            await self._client.training.delete(session.id)
        return await self._begin(objective, batches)

    async def _begin(self, objective: Json, batches: Sequence[Sequence[Json]]) -> TrainingSession:
        """Return a new session from the previous checkpoint, or from nothing."""
        trainer = self._trainer
        start: dict[str, Any] = {"trainable": {"rank": trainer.rank, "alpha": trainer.alpha}}
        if self._job.previous is not None:
            # The adapter says what is trained.
            start = {"adapter": f"{self._name}@{self._job.step - 1}"}
        return await self._client.training.create(
            self._name,
            objective,
            # Samples of a policy come with each step; other objectives have data from the start.
            None if objective["kind"] == POLICY else batches[0],
            estimator={
                "kind": "gradient",
                "learning_rate": trainer.learning_rate,
                "max_grad_norm": trainer.max_grad_norm,
            },
            batch_size=1,
            **start,
        )


def _parts(rows: Sequence[Json], size: int) -> list[list[Json]]:
    return [list(rows[begin : begin + size]) for begin in range(0, len(rows), size)]


def _means(steps: Sequence[GradientStep]) -> dict[str, float]:
    if not steps:
        return {}
    return {"loss": fmean(step.loss for step in steps), "grad_norm": fmean(s.norm for s in steps)}


def _written(checkpoint: Path | None) -> tuple[str, int]:
    """Return the session that has written a checkpoint, and its step; none is "" and 0."""
    path = None if checkpoint is None else checkpoint / SESSION
    if path is None or not path.is_file():
        return "", 0
    written = json.loads(path.read_text())
    return written["session"], written["step"]
