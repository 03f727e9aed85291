"""The command ``python -m examples.grpo.train``; README.md beside this file describes it."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path

from examples.grpo.loop import Loop, Step
from examples.grpo.plot import plot_run
from examples.grpo.policies import OwnPolicy, Policy, ServedPolicy
from examples.grpo.trainer import Settings
from mlx_parallm.client import ClientError, RLClient
from mlx_parallm.demo_models.folders import DEMO_FOLDER, DEMO_NAME


def describe(step: Step) -> str:
    """Return a step's figures as one line."""
    parts = [f"step {step.step:3}", f"reward {step.reward:.3f}"]
    if step.evaluation is not None:
        parts.append(f"held out {step.evaluation:.3f}")
    if step.mismatch is not None:
        parts.append(f"mismatch {step.mismatch:.1e}")
    parts.append(
        f"rollout {step.rollout_s:.1f} s, train {step.train_s:.1f} s, update {step.update_s:.2f} s"
    )
    parts.append(f"at {step.elapsed_s:.0f} s")
    return "  ".join(parts)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="GRPO against a running mlx_parallm server.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server's address")
    parser.add_argument("--api-key", help="its admin key, if it has one")
    parser.add_argument(
        "--on-server", action="store_true", help="train in the server, on its copy of the model"
    )
    parser.add_argument(
        "--model", help="folder of the served model; with --on-server its name (default: embedded)"
    )
    parser.add_argument("--adapter", default="policy", help="the policy's name on the server")
    parser.add_argument("--reward-model", help="a model of the server whose scores are the rewards")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--problems", type=int, default=16, help="problems per step")
    parser.add_argument("--group-size", type=int, default=16, help="samples per problem")
    parser.add_argument("--eval-every", type=int, default=5, help="steps")
    parser.add_argument("--eval-problems", type=int, default=64)
    parser.add_argument(
        "--in-flight", action="store_true", help="sample for the next step while training"
    )
    parser.add_argument(
        "--sleep", action="store_true", help="free the server's KV memory during training"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="write each step as a line of JSON")
    parser.add_argument("--plot", type=Path, help="draw the rewards as SVG")
    for name, value in asdict(Settings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = parser.parse_args(arguments)
    if options.on_server and options.sleep:
        parser.error("a server that trains cannot sleep: leave --sleep out")
    if options.reward_model and options.plot:
        parser.error("scores of a reward model have no place in --plot: leave it out")
    if options.model is None:
        options.model = DEMO_NAME if options.on_server else str(DEMO_FOLDER)
    return options


async def main(options: argparse.Namespace) -> None:
    """Run the loop and write the log and the plot."""
    settings = Settings(**{name: getattr(options, name) for name in asdict(Settings())})
    steps = []
    async with RLClient(options.url, api_key=options.api_key) as client:
        await client.wait_until_ready()
        if options.on_server:
            policy: Policy = await ServedPolicy.begin(client, options, settings)
        else:
            policy = OwnPolicy(client, options, settings)
        try:
            async for step in Loop(client, policy, options).steps():
                steps.append(step)
                print(describe(step), flush=True)
        finally:
            await policy.close()
    if options.log:
        options.log.write_text("".join(json.dumps(asdict(step)) + "\n" for step in steps))
    if options.plot:
        options.plot.write_text(plot_run(steps))


if __name__ == "__main__":
    try:
        asyncio.run(main(parse_arguments()))
    except ClientError as error:
        sys.exit(f"The server: {error}")
