"""The command ``python -m examples.reward_model.train``; see README.md beside this file."""

from __future__ import annotations

import argparse
import asyncio
import sys
from random import Random

from examples.grpo import train as grpo
from examples.grpo.policies import publish
from examples.grpo.task import problems
from examples.reward_model.preferences import Pair, collect_pairs
from mlx_parallm.client import ClientError, Evaluation, RLClient

# TAUGHT, HELD_OUT: problems whose answers become preferences to learn, and to test.
TAUGHT, HELD_OUT = 192, 64
BATCH_SIZE = 16
LEARNING_RATE = 5e-3


def parse_arguments(arguments: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of the command line, and those of ``examples.grpo.train``."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description="A reward model from preferences, and GRPO by its scores. "
        "Other flags are those of examples.grpo.train.",
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server's address")
    parser.add_argument("--api-key", help="its admin key, if it has one")
    parser.add_argument("--judge", default="demo:mlm", help="the model that gets a reward head")
    parser.add_argument("--name", default="taste", help="the reward model's name on the server")
    parser.add_argument("--taught", type=int, default=TAUGHT, help="problems to learn from")
    parser.add_argument("--answers", type=int, default=8, help="answers to each problem")
    parser.add_argument("--judge-steps", type=int, default=100, help="steps of the reward model")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_known_args(arguments)


async def teach(client: RLClient, options: argparse.Namespace) -> Evaluation:
    """Train a reward model on preferences and serve it; return how it orders others."""
    taught, held_out = [
        await collect_pairs(
            client, problems(Random(seed), count), group_size=options.answers, seed=seed
        )
        for seed, count in ((options.seed + 1, options.taught), (options.seed + 2, HELD_OUT))
    ]
    print(f"{len(taught)} preferences to learn from, {len(held_out)} others", flush=True)
    session = await client.training.create(
        options.judge,
        {"kind": "pairs"},
        taught,
        batch_size=min(BATCH_SIZE, len(taught)),
        trainable={"head": "reward", "rank": 16, "alpha": 32},
        estimator={
            "kind": "gradient",
            "learning_rate": LEARNING_RATE,
            "warmup_steps": options.judge_steps // 10,
            "decay_steps": options.judge_steps,
        },
        seed=options.seed,
    )
    try:
        return await learn(client, session.id, held_out, options)
    finally:
        await client.training.delete(session.id)


async def learn(
    client: RLClient, session_id: str, held_out: list[Pair], options: argparse.Namespace
) -> Evaluation:
    """Make the steps of a session, and publish it."""
    before = await client.training.evaluate(session_id, held_out)
    await client.training.run(session_id, options.judge_steps)
    async for step in client.training.events(session_id):
        if step.step % 20 == 0:
            print(f"step {step.step:3}  loss {step.loss:.3f}", flush=True)
    after = await client.training.evaluate(session_id, held_out)
    print(f"in order: {before.accuracy:.1%} of held-out pairs before, {after.accuracy:.1%} after")
    adapter = await publish(client, session_id, options.name)
    print(f"served as {adapter.name}", flush=True)
    return after


async def main(options: argparse.Namespace, flags: list[str]) -> None:
    """Train the reward model, then the policy by its scores."""
    address = ["--url", options.url, *(["--api-key", options.api_key] if options.api_key else [])]
    own = ["--on-server", "--reward-model", options.name, "--seed", str(options.seed)]
    policy = grpo.parse_arguments([*address, *own, *flags])
    async with RLClient(options.url, api_key=options.api_key) as client:
        await client.wait_until_ready()
        await teach(client, options)
    await grpo.main(policy)


if __name__ == "__main__":
    try:
        asyncio.run(main(*parse_arguments()))
    except ClientError as error:
        sys.exit(f"The server: {error}")
