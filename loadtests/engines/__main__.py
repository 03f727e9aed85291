"""Engines and HTTP processes that are killed while requests and updates run.

``python -m loadtests.engines`` serves the embedded model by two engines and two HTTP processes. In
each history, clients stream while versions of an adapter, or of the model's weights, replace one
another; from one to three processes get SIGKILL. It is checked how every answer ended, that the
tokens of each are of the versions that it names, and what is left. At the end the server gets
SIGTERM, and another one SIGKILL, under load.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import httpx2

from benchmarks.checks import Check, conclude
from benchmarks.servers import Server, mlx_parallm_server
from loadtests.engines.clients import Answer, Clients, End
from loadtests.engines.processes import (
    ENGINES,
    HTTP_PROCESSES,
    Children,
    Death,
    left_after,
    wait_until_back,
)
from loadtests.engines.updates import (
    ADAPTER,
    BASE,
    Updates,
    adapter_body,
    model_of,
    weights_body,
)
from loadtests.run import wait_until_idle
from loadtests.swap_clients import Policy
from loadtests.swap_replay import Replay
from loadtests.swap_samples import MOST_ERROR, Output, Sample, wrong_spans

COUNT = 2
FLAGS = ["--data-parallel-size", str(COUNT), "--api-server-count", str(COUNT)]
# LOAD_S: seconds of a history. RESTART_S: until all processes serve again.
LOAD_S, RESTART_S = 4.0, 60.0
#: ``END_S``: seconds in which all processes must have ended.
END_S = 10.0
STREAMS = 6
# WARM: histories before memory is measured.
WARM = 4
MOST_GROWTH = 1.1


@dataclass(slots=True)
class Result:
    """The results of all histories."""

    answers: list[Answer] = field(default_factory=list)
    deaths: list[Death] = field(default_factory=list)
    updates: int = 0
    refused_updates: list[str] = field(default_factory=list)
    unhealthy: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    left: float = 0.0
    seconds: float = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--histories", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    result, begin_s = Result(), time.monotonic()
    with mlx_parallm_server(None, FLAGS) as server:
        policies = asyncio.run(run_histories(server, args.histories, args.seed, result))
        terminated = asyncio.run(end_under_load(server, policies, signal.SIGTERM))
    with mlx_parallm_server(None, FLAGS) as server:
        killed = asyncio.run(end_under_load(server, [Policy(BASE)], signal.SIGKILL))
    result.seconds = time.monotonic() - begin_s
    checks = checks_of(result, policies, terminated, killed)
    return conclude("engines", checks, details_of(result, args.seed))


async def run_histories(server: Server, count: int, seed: int, result: Result) -> list[Policy]:
    """Run the histories; return the policies, which know what was sent."""
    adapter, base = Policy(ADAPTER), Policy(BASE)
    children = Children(server)
    changes = [
        Updates(server.base_url, adapter, adapter_body),
        Updates(server.base_url, base, weights_body),
    ]
    for updates in changes:
        await updates.send()
    for number in range(count):
        draw = random.Random(seed + number)
        updates = changes[number % len(changes)]
        await run_history(server, children, updates, draw, result)
        result.memory.append(children.resident_bytes())
        print(f"history {number}: {len(result.answers)} answers", flush=True)
    result.deaths = children.deaths
    result.updates = sum(updates.policy.live for updates in changes)
    result.refused_updates = [why for updates in changes for why in updates.failures]
    return [adapter, base]


async def run_history(
    server: Server, children: Children, updates: Updates, draw: random.Random, result: Result
) -> None:
    """Let processes die under load; return when all serve again and nothing runs."""
    clients = Clients(server.base_url)
    async with asyncio.TaskGroup() as tasks:
        policy = updates.policy
        tasks.create_task(clients.run([(policy, model_of(policy))], STREAMS))
        tasks.create_task(updates.run(lambda: clients.is_stopped, draw))
        tasks.create_task(watch_health(server, children, clients, result))
        await kill_some(children, draw)
        clients.is_stopped = True
    result.answers += clients.answers
    await asyncio.to_thread(wait_until_back, children, COUNT, RESTART_S)
    result.left += sum((await asyncio.to_thread(wait_until_idle, server)).values())


async def kill_some(children: Children, draw: random.Random) -> None:
    """Kill processes at random times of a history, but never the last engine."""
    count = draw.randint(1, 3)
    times = sorted(draw.uniform(0.3, LOAD_S - 0.5) for _ in range(count))
    begin_s = time.monotonic()
    for at_s in times:
        await asyncio.sleep(max(0.0, begin_s + at_s - time.monotonic()))
        role = draw.choice((ENGINES, ENGINES, HTTP_PROCESSES))
        if role == ENGINES and not await asyncio.to_thread(children.are_back, COUNT):
            role = HTTP_PROCESSES
        await asyncio.to_thread(children.kill, role, draw.randrange(COUNT))
    await asyncio.sleep(max(0.0, begin_s + LOAD_S - time.monotonic()))


async def watch_health(
    server: Server, children: Children, clients: Clients, result: Result
) -> None:
    """Note whenever /health does not answer 200, unless its HTTP process was killed meanwhile."""
    while not clients.is_stopped:
        begin_s = time.perf_counter()
        try:
            async with httpx2.AsyncClient(base_url=server.base_url, timeout=30.0) as http:
                status = (await http.get("/health")).status_code
        except httpx2.TransportError as cause:
            if not died_within(children.deaths, HTTP_PROCESSES, begin_s, time.perf_counter()):
                result.unhealthy.append(repr(cause))
            continue
        if status != 200:
            result.unhealthy.append(f"status {status}")
        await asyncio.sleep(0.05)


async def end_under_load(server: Server, policies: list[Policy], how: int) -> tuple[list[int], int]:
    """Send the server a signal while clients stream.

    Returns:
        The processes that are left, and how many streams ended in silence.
    """
    clients = Clients(server.base_url)
    running = asyncio.create_task(
        clients.run([(policy, model_of(policy)) for policy in policies], STREAMS)
    )
    children = await asyncio.to_thread(Children(server).all)
    await asyncio.sleep(1.0)
    server.process.send_signal(how)
    clients.is_stopped = True
    await running
    await asyncio.to_thread(server.process.wait, END_S)
    left = await asyncio.to_thread(left_after, children, END_S)
    return left, sum(answer.end is End.SILENT for answer in clients.answers)


def died_within(deaths: list[Death], role: str, begin_s: float, end_s: float) -> bool:
    """True if a process of the role was killed in a span of time."""
    return any(death.role == role and begin_s <= death.at_s <= end_s for death in deaths)


def why_wrong(answer: Answer, deaths: list[Death]) -> str | None:
    """Return why an answer should not have ended as it did; None if it may."""
    hit = partial(died_within, deaths, begin_s=answer.begin_s, end_s=answer.end_s)
    match answer.end:
        case End.COMPLETE:
            return None
        case End.ERROR if not hit(role=ENGINES):
            return f"an error, and no engine died: {answer.why}"
        case End.ERROR if not answer.num_tokens:
            return f"an error before the first token: {answer.why}"
        case End.BROKEN if not hit(role=HTTP_PROCESSES):
            return f"a broken connection, and no HTTP process died: {answer.why}"
        case End.REFUSED | End.SILENT:
            return f"{answer.end}: {answer.why}"
        case _:
            return None


def wrong_outputs(result: Result, policies: list[Policy]) -> tuple[list[str], list[float]]:
    """Return the complete answers with wrong spans, and the errors of log-probabilities.

    Log-probabilities are replayed with mlx_lm for the first samples of each version of the adapter.
    """
    replay, wrong, errors = Replay(), [], []
    numbers = range(max(policy.sent for policy in policies) + 1)
    seeds = {number: number for number in numbers}
    for answer in result.answers:
        if answer.end is not End.COMPLETE or answer.sample is None:
            continue
        why = wrong_spans(answer.sample)
        if why is not None:
            wrong.append(why)
        elif answer.sample.policy == ADAPTER and not errors_are_enough(errors):
            errors.append(replay.error(answer.sample, seeds))
    return wrong, errors + wrong_of_base(result)


def errors_are_enough(errors: list[float]) -> bool:
    """True if so many samples were replayed that more would only take time."""
    return len(errors) >= 400


def wrong_of_base(result: Result) -> list[float]:
    """Return how far equal beginnings of the model's own answers are apart.

    Versions with even numbers have the same weights, and so have those with odd numbers.
    """
    firsts: dict[tuple[str, int], Output] = {}
    errors: list[float] = []
    for sample in complete_of(result, BASE):
        span = sample.output.spans[0]
        key = (sample.case, int(span.version.removeprefix("v")) % 2)
        known = firsts.setdefault(key, sample.output)
        length = min(span.end, known.spans[0].end)
        same = list(known.token_ids[:length]) == list(sample.output.token_ids[:length])
        pairs = zip(known.logprobs[:length], sample.output.logprobs[:length], strict=True)
        errors.append(max(abs(a - b) for a, b in pairs) if same else float("inf"))
    return errors


def complete_of(result: Result, policy: str) -> list[Sample]:
    """Return the complete samples of a policy whose spans are in order."""
    samples = [answer.sample for answer in result.answers if answer.end is End.COMPLETE]
    return [
        sample
        for sample in samples
        if sample is not None and sample.policy == policy and wrong_spans(sample) is None
    ]


def checks_of(
    result: Result,
    policies: list[Policy],
    terminated: tuple[list[int], int],
    killed: tuple[list[int], int],
) -> list[Check]:
    """Return the table."""
    ends = Counter(answer.end for answer in result.answers)
    roles = Counter(death.role for death in result.deaths)
    unexpected = [why for answer in result.answers if (why := why_wrong(answer, result.deaths))]
    for why in unexpected[:10]:
        print(why)
    spans, errors = wrong_outputs(result, policies)
    growth = max(result.memory[WARM:], default=0) / max(result.memory[:WARM])
    return [
        Check("engines killed", roles[ENGINES], ">=", 1),
        Check("HTTP processes killed", roles[HTTP_PROCESSES], ">=", 1),
        Check("updates of an adapter and of the weights", result.updates, ">=", 1),
        Check("updates refused", len(result.refused_updates), "==", 0),
        Check("complete answers", ends[End.COMPLETE], ">=", 1),
        Check("answers that an engine's death ended", ends[End.ERROR]),
        Check("answers that an HTTP process's death broke", ends[End.BROKEN]),
        Check("answers with an unexpected end", len(unexpected), "==", 0),
        Check("answers of /health other than 200", len(result.unhealthy), "==", 0),
        Check("answers with wrong versions", len(spans), "==", 0),
        Check("answers replayed or compared", len(errors), ">=", 1),
        Check("largest error of a log-probability", max(errors, default=0.0), "<=", MOST_ERROR),
        Check("requests and blocks left", result.left, "==", 0),
        Check(
            "largest resident memory, relative to the first four histories",
            growth,
            "<=",
            MOST_GROWTH,
        ),
        Check("processes left after SIGTERM", len(terminated[0]), "==", 0),
        Check("streams that SIGTERM ended without an error event", terminated[1], "==", 0),
        Check("processes left after SIGKILL", len(killed[0]), "==", 0),
        Check("seconds in all", result.seconds, "<=", 300),
    ]


def details_of(result: Result, seed: int) -> dict[str, object]:
    """Return what explains the table."""
    reasons = (why_wrong(answer, result.deaths) for answer in result.answers)
    return {
        "seed": seed,
        "refused_updates": result.refused_updates[:20],
        "unhealthy": result.unhealthy[:20],
        "memory": result.memory,
        "unexpected": [why for why in reasons if why is not None][:20],
    }


if __name__ == "__main__":
    sys.exit(main())
