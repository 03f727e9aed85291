"""Collection of samples from the server, with their rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

from examples.grpo.task import Problem, reward
from examples.grpo.trainer import TrainingSample, group_advantages
from mlx_parallm.client import RLClient, Rollout, Sample
from mlx_parallm.client.rl import RolloutOptions

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
    client: RLClient,
    problems: Sequence[Problem],
    *,
    adapter: str,
    group_size: int,
    seed: int,
    reward_model: str | None = None,
) -> Collected:
    """Sample a group of answers to each problem, at temperature 1, and score them.

    ``reward_model``: a model of the server whose scores are the rewards; None: the task's.
    """
    options: RolloutOptions = {"adapter": adapter, "seed": seed}
    if reward_model is not None:
        options["reward_model"] = {"model": reward_model}
    rollout = await sample(client, problems, n=group_size, **options)
    samples, rewards = [], []
    for problem, group in zip(problems, rollout.groups, strict=True):
        of_group = [_reward(each, problem, reward_model) for each in group.samples]
        for each, advantage in zip(group.samples, group_advantages(of_group), strict=True):
            ids = group.prompt.token_ids
            samples.append(TrainingSample(ids, each.token_ids, each.logprobs, advantage))
        rewards.append(of_group)
    versions = {span.version for each in rollout.samples for span in each.versions}
    return Collected(samples, rewards, versions)


def _reward(answer: Sample, problem: Problem, reward_model: str | None) -> float:
    if reward_model is None:
        return reward(answer.text, problem)
    if answer.reward is None:
        raise RuntimeError(f"{reward_model} gives no reward: {answer.reward_error}")
    return answer.reward


async def evaluate(client: RLClient, problems: Sequence[Problem], *, adapter: str) -> float:
    """Return the mean reward of greedy answers, by the task."""
    rollout = await sample(client, problems, adapter=adapter, n=1, seed=0, temperature=0.0)
    rewards = [
        reward(answer.text, problem)
        for problem, answer in zip(problems, rollout.samples, strict=True)
    ]
    return sum(rewards) / len(rewards)


async def sample(
    client: RLClient, problems: Sequence[Problem], *, n: int, **options: Unpack[RolloutOptions]
) -> Rollout:
    """Return ``n`` answers to each problem; reward models read them behind ``judged_prompt``."""
    prompts = [
        {
            "messages": [{"role": "user", "content": problem.question}],
            "reward_prompt": judged_prompt(problem),
        }
        for problem in problems
    ]
    settings: RolloutOptions = {
        "max_tokens": MAX_TOKENS,
        "chat_template_kwargs": NO_THINKING,
        **options,
    }
    return await client.rollout(prompts, n=n, **settings)


def judged_prompt(problem: Problem) -> str:
    """Return what a reward model reads before an answer."""
    return f"{problem.question} : "
