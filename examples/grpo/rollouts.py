"""Collection of samples from the server, with their rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from examples.grpo.task import Problem, reward
from examples.grpo.trainer import TrainingSample, group_advantages
from mlx_parallm.client import RLClient, Rollout

MAX_TOKENS = 24
NO_THINKING = {"enable_thinking": False}


@dataclass(frozen=True, slots=True)
class Collected:
    """A step's samples.

    Attributes:
        samples: the samples of all groups.
        rewards: one per sample, by group.
        versions: labels of the weights that made any of their tokens.
    """

    samples: list[TrainingSample]
    rewards: list[list[float]]
    versions: set[str]

    @property
    def mean_reward(self) -> float:
        """The mean reward of all samples."""
        return sum(map(sum, self.rewards)) / sum(map(len, self.rewards))


async def collect(
    client: RLClient, problems: Sequence[Problem], *, adapter: str, group_size: int, seed: int
) -> Collected:
    """Sample a group of answers to each problem, at temperature 1, and score them."""
    rollout = await _ask(client, problems, adapter=adapter, n=group_size, seed=seed)
    samples, rewards = [], []
    for problem, group in zip(problems, rollout.groups, strict=True):
        of_group = [reward(sample.text, problem) for sample in group.samples]
        for sample, advantage in zip(group.samples, group_advantages(of_group), strict=True):
            ids = group.prompt.token_ids
            samples.append(TrainingSample(ids, sample.token_ids, sample.logprobs, advantage))
        rewards.append(of_group)
    versions = {span.version for sample in rollout.samples for span in sample.versions}
    return Collected(samples, rewards, versions)


async def evaluate(client: RLClient, problems: Sequence[Problem], *, adapter: str) -> float:
    """Return the mean reward of greedy answers."""
    rollout = await _ask(client, problems, adapter=adapter, n=1, seed=0, temperature=0.0)
    rewards = [
        reward(sample.text, problem)
        for problem, sample in zip(problems, rollout.samples, strict=True)
    ]
    return sum(rewards) / len(rewards)


async def _ask(
    client: RLClient,
    problems: Sequence[Problem],
    *,
    adapter: str,
    n: int,
    seed: int,
    temperature: float = 1.0,
) -> Rollout:
    return await client.rollout(
        [[{"role": "user", "content": problem.question}] for problem in problems],
        n=n,
        adapter=adapter,
        seed=seed,
        temperature=temperature,
        max_tokens=MAX_TOKENS,
        chat_template_kwargs=NO_THINKING,
    )
