"""Fine-tuning jobs by OpenAI's client alone: of conversations, and of preferences.

``python -m benchmarks.fine_tuning`` serves the embedded model and teaches it the wordings of
``examples/grpo``: a supervised job learns from sums that end in 1 to 9, and each of its checkpoints
is asked for other sums, and for sums that end in 0, which are never trained. Then a job of the
method ``dpo`` learns from pairs of a right and a wrong answer, and its model is asked subtractions
in the wording of the embedded model's own training, which the job does not have.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import openai
from openai.types.fine_tuning import FineTuningJob

from benchmarks.checks import Check, conclude
from benchmarks.servers import SERVED_NAME, mlx_parallm_server
from examples.grpo.task import Problem, problems, reward

NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
# HYPER: of the job; the multiplier makes Adam's rate 2e-3.
HYPER = {"batch_size": 16, "n_epochs": 1, "learning_rate_multiplier": 10, "rank": 16, "alpha": 32}
MAX_TOKENS, MAX_THINKING_TOKENS = 24, 256
# POLL_S: seconds between two looks at the job.
POLL_S = 0.5
MOST_SECONDS, LEAST_UNSEEN, LEAST_KEPT = 300.0, 0.9, 0.95
# PREFERENCE_HYPER: of the job on pairs; the multiplier makes Adam's rate 5e-4.
PREFERENCE_HYPER = HYPER | {"n_epochs": 3, "learning_rate_multiplier": 100, "beta": 0.1}
# PAIRS, HELD_OUT_PAIRS: sums whose wrong answers make pairs, and the last steps to be compared.
PAIRS, HELD_OUT_PAIRS, LAST_STEPS = 256, 64, 8


@dataclass(frozen=True, slots=True)
class Point:
    """Shares of right answers of a checkpoint.

    Attributes:
        step: its step.
        unseen: of sums that were not trained.
        ending_in_0: of sums that end in 0.
    """

    step: int
    unseen: float
    ending_in_0: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--eval-every", type=int, default=25, help="steps")
    parser.add_argument("--eval-problems", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="fine-tuning-") as folder,
        mlx_parallm_server(None, ["--data-dir", folder]) as server,
    ):
        load = os.getloadavg()[0]
        return asyncio.run(measure(server.base_url, options, load))


async def measure(url: str, options: argparse.Namespace, load: float) -> int:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=None) as client:
        before = await point(client, SERVED_NAME, 0, options, extra_body=NO_THINKING)
        job, curve = await supervised(client, options)
        seconds = (job.finished_at or 0) - job.created_at
        preferences, margins, kept = await preferred(client, options)
    last, best = curve[-1], max(each.ending_in_0 for each in curve)
    gained = statistics.mean(margins[-LAST_STEPS:]) - margins[0]
    checks = [
        Check("supervised: seconds of the job", seconds, "<=", MOST_SECONDS),
        Check("supervised: right before", before.unseen),
        Check("supervised: right of unseen sums", last.unseen, ">=", LEAST_UNSEEN),
        Check("sums that end in 0: right before", before.ending_in_0),
        Check("sums that end in 0: right at the best checkpoint", best),
        Check("sums that end in 0: right at the end", last.ending_in_0),
        Check("preferences: growth of the margin", gained, ">=", 0.0),
        Check("preferences: pairs in order", preferences),
        Check("preferences: right of an untouched task over before", kept, ">=", LEAST_KEPT),
    ]
    details = {
        "options": vars(options),
        "load_average": load,
        "curve": [asdict(each) for each in (before, *curve)],
        "margins": margins,
    }
    return conclude("fine_tuning", checks, details)


async def supervised(
    client: openai.AsyncOpenAI, options: argparse.Namespace
) -> tuple[FineTuningJob, list[Point]]:
    """Run the job; return it with what its checkpoints answer."""
    trained = problems(Random(options.seed), 16 * options.steps)
    file = await upload(client, [{"messages": turns(each, str(each.answer))} for each in trained])
    hyper = HYPER | {"eval_every": options.eval_every}
    curve: list[Point] = []

    async def ask_new(job: FineTuningJob) -> None:
        for each in reversed((await client.fine_tuning.jobs.checkpoints.list(job.id)).data):
            if each.step_number > (curve[-1].step if curve else 0):
                name = each.fine_tuned_model_checkpoint
                curve.append(await point(client, name, each.step_number, options))
                print(curve[-1], f"load {os.getloadavg()[0]:.1f}", flush=True)

    method: Any = {"type": "supervised", "supervised": {"hyperparameters": hyper}}
    job = await client.fine_tuning.jobs.create(
        model=SERVED_NAME, training_file=file, method=method, seed=options.seed
    )
    return await ended(client, job, ask_new), curve


async def ended(
    client: openai.AsyncOpenAI,
    job: FineTuningJob,
    look: Callable[[FineTuningJob], Awaitable[None]] | None = None,
) -> FineTuningJob:
    """Return a job that has ended; ``look`` is called meanwhile, and once more at its end."""
    while True:
        is_running = job.status in ("validating_files", "queued", "running")
        if look is not None:
            await look(job)
        if not is_running:
            break
        await asyncio.sleep(POLL_S)
        job = await client.fine_tuning.jobs.retrieve(job.id)
    if job.status != "succeeded":
        raise RuntimeError(f"The job is {job.status}: {job.error}")
    return job


async def upload(client: openai.AsyncOpenAI, rows: Sequence[Any]) -> str:
    """Upload a file of rows; return its id."""
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    file = await client.files.create(file=("sums.jsonl", io.BytesIO(content)), purpose="fine-tune")
    return file.id


def turns(problem: Problem, answer: str) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": problem.question},
        {"role": "assistant", "content": answer},
    ]


async def point(
    client: openai.AsyncOpenAI, model: str, step: int, options: argparse.Namespace, **fields: Any
) -> Point:
    """Ask a model for sums that were not trained; ``fields`` are further ones of the requests."""
    # The wordings have too many sums for a drawn one to be among those of another seed.
    unseen, ending_in_0 = [
        await share_right(
            client, model, problems(Random(0), options.eval_problems, held_out=each), **fields
        )
        for each in (False, True)
    ]
    return Point(step, unseen, ending_in_0)


async def share_right(
    client: openai.AsyncOpenAI,
    model: str,
    sums: Sequence[Problem],
    max_tokens: int = MAX_TOKENS,
    **fields: Any,
) -> float:
    """Return the share of problems whose likeliest answer is right."""
    answers = await asyncio.gather(
        *(
            client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": each.question}],
                temperature=0,
                max_tokens=max_tokens,
                **fields,
            )
            for each in sums
        )
    )
    texts = [answer.choices[0].message.content or "" for answer in answers]
    return statistics.mean(map(reward, texts, sums))


async def preferred(
    client: openai.AsyncOpenAI, options: argparse.Namespace
) -> tuple[float, list[float], float]:
    """Run a job on pairs; return the share in order, the margins, and what is right of before."""
    untouched = subtractions(Random(0), options.eval_problems)
    before = await share_right(client, SERVED_NAME, untouched, MAX_THINKING_TOKENS)
    training, validation = [
        await upload(client, await pairs(client, problems(Random(seed), count)))
        for seed, count in ((options.seed, PAIRS), (0, HELD_OUT_PAIRS))
    ]
    begin_s = time.monotonic()
    method: Any = {"type": "dpo", "dpo": {"hyperparameters": PREFERENCE_HYPER}}
    job = await client.fine_tuning.jobs.create(
        model=SERVED_NAME,
        training_file=training,
        validation_file=validation,
        method=method,
        seed=options.seed,
    )
    job = await ended(client, job)
    events = [each async for each in client.fine_tuning.jobs.list_events(job.id, limit=100)]
    data: list[Any] = [each.data for each in reversed(events) if each.type == "metrics"]
    margins = [each["train_margin"] for each in data if "train_margin" in each]
    orders = [each["valid_accuracy"] for each in data if each.get("valid_accuracy") is not None]
    print(f"preferences: {time.monotonic() - begin_s:.0f} s, margins {margins[::8]}")
    model = job.fine_tuned_model or ""
    after = await share_right(client, model, untouched, MAX_THINKING_TOKENS)
    print(f"untouched: {before:.3f} before, {after:.3f} after")
    return orders[-1], margins, after / before


async def pairs(client: openai.AsyncOpenAI, sums: Sequence[Problem]) -> list[dict[str, Any]]:
    """Return pairs of the right answer and of a wrong one that the model has sampled."""
    answers = await asyncio.gather(
        *(
            client.chat.completions.create(
                model=SERVED_NAME,
                messages=[{"role": "user", "content": each.question}],
                max_tokens=MAX_TOKENS,
                seed=number,
                extra_body=NO_THINKING,
            )
            for number, each in enumerate(sums)
        )
    )
    rows: list[dict[str, Any]] = []
    for problem, answer in zip(sums, answers, strict=True):
        said = answer.choices[0].message.content or ""
        if not reward(said, problem):
            ask, right = turns(problem, str(problem.answer))
            wrong = {"role": "assistant", "content": said}
            rows.append(
                {
                    "input": {"messages": [ask]},
                    "preferred_output": [right],
                    "non_preferred_output": [wrong],
                }
            )
    return rows


def subtractions(rng: Random, count: int) -> list[Problem]:
    """Return differences of numbers of two digits, in words of the model's training."""
    drawn = [sorted((rng.randint(10, 99), rng.randint(10, 99))) for _ in range(count)]
    return [Problem(f"What is {most} - {least}?", most - least) for least, most in drawn]


if __name__ == "__main__":
    raise SystemExit(main())
