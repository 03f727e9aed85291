"""The command ``python -m examples.mezo.train``; README.md beside this file describes it."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from random import Random
from typing import Any

from examples.mezo.task import Row, label_words, read_rows, reviews, split
from mlx_parallm.client import ClientError, Evaluation, MezoClient, RLClient, TrainingSession

DEMO = "demo:mlm"
# DEMO_WORDS: they mean nothing to the embedded model, so that it has to learn them.
DEMO_WORDS = ("negative=cat", "positive=dog")
WORDS = ("negative=terrible", "positive=great")
# DEMO_ROWS: reviews to train on and to hold out.
DEMO_ROWS = (1024, 512)
TARGETS = ("value", "output.dense")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="Trains a served masked LM by forward passes.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server's address")
    parser.add_argument("--api-key", help="its admin key, if it has one")
    parser.add_argument("--model", default=DEMO, help="name of the served model")
    parser.add_argument("--data", type=Path, help="file of a label, a tab and a text in each line")
    parser.add_argument("--words", nargs="+", metavar="LABEL=WORD", help="word of each label")
    parser.add_argument("--template", default="{text} It was [MASK].")
    parser.add_argument("--held-out", type=int, default=512, help="rows of the file to evaluate on")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, help="default: 16, and 64 of a file")
    parser.add_argument("--targets", nargs="+", help="ends of the paths of trained linear layers")
    parser.add_argument("--layers", help="all, or top:N; default: top:1, and all of a file")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--report-every", type=int, default=100, help="steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--publish", metavar="NAME", help="serve the adapter under this name")
    options = parser.parse_args(arguments)
    if options.data is None and options.model != DEMO:
        parser.error("--model needs --data")
    return options


def session_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the session: those of the paper for a file of the caller."""
    is_paper = options.data is not None
    targets = ("query", "value") if is_paper else TARGETS
    trainable = {
        "targets": options.targets or list(targets),
        "layers": options.layers or ("all" if is_paper else "top:1"),
        "rank": options.rank,
        "alpha": 16,
    }
    ours = {"learning_rate": 1e-2, "decay_steps": options.steps, "directions": 4}
    return {
        "trainable": trainable,
        "estimator": {"preset": "paper"} if is_paper else ours,
        "batch_size": options.batch_size or (64 if is_paper else 16),
        "seed": options.seed,
    }


def rows_of(options: argparse.Namespace) -> tuple[list[Row], list[Row]]:
    """Return the rows to train on and the held-out rows.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file has other content.
    """
    rng = Random(options.seed)
    if options.data is None:
        return split(reviews(rng, sum(DEMO_ROWS)), DEMO_ROWS[1], rng)
    return split(read_rows(options.data), options.held_out, rng)


def describe(name: str, evaluation: Evaluation) -> str:
    """Return the figures of an evaluation as one line."""
    return (
        f"{name}: loss {evaluation.loss:.3f}, accuracy {evaluation.accuracy:.1%} "
        f"of {evaluation.num_examples} held-out texts"
    )


def describe_costs(session: TrainingSession) -> str:
    """Return the costs of a session's steps as one line."""
    totals = session.totals
    computed = totals.layer_tokens / max(1, totals.naive_layer_tokens)
    cache = f"prefix cache {session.prefix_cache}"
    if totals.lookups:
        cache = f"prefix cache {totals.hits / totals.lookups:.1%} hits"
    return f"{totals.forward_s:.1f} s of forwards, {cache}, {computed:.0%} of the naive computation"


async def train(mezo: MezoClient, session: TrainingSession, options: argparse.Namespace) -> None:
    """Make all steps in the background and print their mean losses."""
    await mezo.run(session.id, options.steps)
    losses: list[float] = []
    async for step in mezo.events(session.id):
        losses.append((step.loss_plus + step.loss_minus) / 2)
        if len(losses) == options.report_every:
            print(f"step {step.step}: loss {sum(losses) / len(losses):.3f}", flush=True)
            losses.clear()


async def check_name(client: RLClient, name: str | None) -> None:
    """Raise ValueError if the server has an adapter of this name: another one could not have it."""
    if name in [adapter.name for adapter in await client.adapters()]:
        raise ValueError(f"There is an adapter {name} already; choose another name to --publish.")


async def learn(mezo: MezoClient, session: TrainingSession, options: argparse.Namespace) -> None:
    """Train, evaluate and publish; the session stays if it has made steps and is not published."""
    _, held_out = rows_of(options)
    try:
        print(f"{session.id}: {session.num_parameters} parameters are trained")
        print(describe("before", await mezo.evaluate(session.id, held_out)))
        await train(mezo, session, options)
        print(describe("after", await mezo.evaluate(session.id, held_out)))
        print(describe_costs(await mezo.get(session.id)))
        if options.publish:
            adapter = await mezo.publish(session.id, options.publish)
            print(f"served as {adapter.name}, version {adapter.version}")
    except BaseException:
        if (await mezo.get(session.id)).step:
            print(f"The session stays: /v1/mezo/sessions/{session.id} can be run and published.")
        else:
            await mezo.delete(session.id)
        raise
    await mezo.delete(session.id)


async def main(options: argparse.Namespace) -> None:
    """Make a session, train, evaluate and publish."""
    train_rows, _ = rows_of(options)
    words = options.words or (DEMO_WORDS if options.data is None else WORDS)
    objective = {
        "kind": "label_words",
        "template": options.template,
        "label_words": label_words(words),
    }
    async with RLClient(options.url, api_key=options.api_key) as client:
        await client.wait_until_ready()
        await check_name(client, options.publish)
        session = await client.mezo.create(
            options.model, objective, train_rows, **session_options(options)
        )
        await learn(client.mezo, session, options)


if __name__ == "__main__":
    try:
        asyncio.run(main(parse_arguments()))
    except ClientError as error:
        sys.exit(f"The server: {error}")
    except (OSError, ValueError) as error:
        sys.exit(str(error))
