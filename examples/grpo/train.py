"""``python -m examples.grpo.train``: the loop. See README.md beside this file."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from random import Random

from examples.grpo.plot import plot_run
from examples.grpo.rollouts import collect, evaluate
from examples.grpo.task import problems
from examples.grpo.trainer import Settings, Trainer
from mlx_parallm.client import ClientError, RLClient
from mlx_parallm.demo.paths import model_path


@dataclass(slots=True)
class Step:
    """What is known of a step.

    Attributes:
        step: its number.
        version: label of the weights that sampled.
        reward: mean of the samples.
        evaluation: mean reward of the likeliest answers to held-out problems, now and then.
        mismatch: see ``Trainer.update``.
        rollout_s: time to sample.
        train_s: time to train.
        update_s: time to upload, until the server uses the new weights.
        elapsed_s: since the loop began, up to the samples.
    """

    step: int
    version: str
    reward: float
    evaluation: float | None
    mismatch: float | None
    rollout_s: float
    train_s: float
    update_s: float
    elapsed_s: float


class Loop:
    """Sample, score, train, upload."""

    def __init__(self, client: RLClient, trainer: Trainer, options: argparse.Namespace) -> None:
        self._client = client
        self._trainer = trainer
        self._options = options
        self._random = Random(options.seed)
        self._held_out = problems(Random(0), options.eval_problems, held_out=True)
        self._version: str | None = None
        self._began_s = time.monotonic()

    async def run(self) -> list[Step]:
        """All steps; each is printed as it ends."""
        await self._upload("0")
        steps = []
        for number in range(self._options.steps):
            steps.append(await self._step(number))
            print(describe(steps[-1]), flush=True)
        return steps

    async def _upload(self, version: str) -> None:
        """Have the server sample with the trainer's weights from now on."""
        tensors, config = self._trainer.adapter()
        # Refused if somebody else has changed the policy in the meantime.
        info = await self._client.update_adapter(
            self._options.adapter,
            tensors,
            config,
            version=version,
            expected_version=self._version,
        )
        self._version = info.version

    async def _step(self, number: int) -> Step:
        options = self._options
        evaluation = None
        if number % options.eval_every == 0 or number == options.steps - 1:
            evaluation = await evaluate(self._client, self._held_out, adapter=options.adapter)
        asked = problems(self._random, options.problems)
        marks = [time.monotonic()]
        collected = await collect(
            self._client,
            asked,
            adapter=options.adapter,
            group_size=options.group_size,
            seed=options.seed + number * options.problems * options.group_size,
        )
        marks.append(time.monotonic())
        sampled_by = self._version or ""
        if collected.versions != {sampled_by}:
            raise RuntimeError(f"sampled by {collected.versions}, not by {sampled_by!r}")
        measured = self._trainer.update(collected.samples)
        marks.append(time.monotonic())
        await self._upload(str(number + 1))
        marks.append(time.monotonic())
        rollout_s, train_s, update_s = (b - a for a, b in pairwise(marks))
        return Step(
            step=number,
            version=sampled_by,
            reward=collected.mean_reward,
            evaluation=evaluation,
            mismatch=measured.get("mismatch"),
            rollout_s=rollout_s,
            train_s=train_s,
            update_s=update_s,
            elapsed_s=marks[1] - self._began_s,
        )


def describe(step: Step) -> str:
    """A step in one line."""
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
    """The command line."""
    parser = argparse.ArgumentParser(description="GRPO against a running mlx_parallm server.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server's address")
    parser.add_argument("--api-key", help="its admin key, if it has one")
    parser.add_argument(
        "--model", type=Path, default=model_path(), help="folder of the served model"
    )
    parser.add_argument("--adapter", default="policy", help="what the policy is called there")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--problems", type=int, default=16, help="of each step")
    parser.add_argument("--group-size", type=int, default=16, help="samples of each problem")
    parser.add_argument("--eval-every", type=int, default=5, help="steps")
    parser.add_argument("--eval-problems", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="write each step as a line of JSON")
    parser.add_argument("--plot", type=Path, help="draw the rewards as SVG")
    defaults = Settings()
    for name, value in asdict(defaults).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return parser.parse_args(arguments)


async def main(options: argparse.Namespace) -> None:
    """Run the loop and write what was asked for."""
    settings = Settings(**{name: getattr(options, name) for name in asdict(Settings())})
    trainer = Trainer(options.model, settings, seed=options.seed)
    async with RLClient(options.url, api_key=options.api_key) as client:
        await client.wait_until_ready()
        steps = await Loop(client, trainer, options).run()
    if options.log:
        options.log.write_text("".join(json.dumps(asdict(step)) + "\n" for step in steps))
    if options.plot:
        options.plot.write_text(plot_run(steps))


if __name__ == "__main__":
    try:
        asyncio.run(main(parse_arguments()))
    except ClientError as error:
        sys.exit(f"The server: {error}")
