"""One hostile client beside eight normal ones: how much longer do these wait for a first token?

``python -m loadtests.hostile`` serves the embedded model with a key for each client. Phases in
which the normal clients are alone, beside each attack and beside all of them take turns. The exit
status is 0 when, beside each, the 99th percentile of the normal ones' time to the first token is at
most twice that of the phases alone, no normal request failed, and the server's memory is bounded.
Beside long texts, the gaps within their answers are bounded in the same way, ``/health`` answers
within 100 ms, and memory comes back.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import os
import random
import re
import shlex
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.checks import Check, conclude
from benchmarks.servers import SERVED_NAME, Server, mlx_parallm_server, server_of_models
from loadtests.attacks import ATTACKS, AUDIO_ATTACKS, IMAGE_ATTACKS, SPEECH, attack_for
from loadtests.cases import make_cases
from mlx_parallm.demo_models.folders import DEMO_NAME
from tests.builders.speech_folders import write_speech

NUM_NORMAL = 8
HOSTILE_KEY = "hostile"
TIMEOUT_S = 120.0
MAX_PAUSE_S = 0.2
# TEXT matches a chunk with text; the first chunk has only a role.
TEXT = re.compile(rb'"(?:content|reasoning)":"[^"]')
# REFUSED matches a line of the server's log.
REFUSED = re.compile(r" status=4\d\d ")
# SERVER_OPTIONS give the hostile client enough sequences to work, but few beside the others.
SERVER_OPTIONS = ["--max-num-seqs-per-key", "8", "--client-timeout", "5"]
# SETTLE_S: seconds until the effects of an attack are gone.
SETTLE_S = 6.0
# BEGIN_S: seconds until the attacking processes have made what they send.
BEGIN_S = 4.0
# MIN_TOKENS: the model that sees ends many answers about texts at once.
MIN_TOKENS = 4
MOST_RATIO = 2.0
# MOST_HEALTH_S: seconds until /health answers beside long texts; the memory limit is a ratio.
MOST_HEALTH_S = 0.1
MOST_KEPT = 1.1
HEALTH_PAUSE_S = 0.05
MOST_GROWTH_BYTES = 512 * 1024 * 1024
# MOST_MEDIA_GROWTH_BYTES: --max-body-bytes-per-key is 256 MiB, and strings of bodies are copies.
MOST_MEDIA_GROWTH_BYTES = 1024 * 1024 * 1024

#: ``MEDIA_ATTACKS``: those by large files.
MEDIA_ATTACKS = (*IMAGE_ATTACKS, *AUDIO_ATTACKS)


@dataclass(slots=True)
class Phase:
    """The normal clients' measurements in one kind of phase."""

    first_token_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Result:
    """Every phase alone, and those beside each case of attacks."""

    alone: Phase
    beside: dict[str, Phase]
    loads: list[float] = field(default_factory=list)
    grown_bytes: int = 0
    kept: dict[str, float] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter[str])

    @property
    def failures(self) -> list[str]:
        """The failures of normal clients, in all phases."""
        return [
            failure for phase in (self.alone, *self.beside.values()) for failure in phase.failures
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="default: the embedded one")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=8.0, help="of a phase")
    parser.add_argument(
        "--attacks",
        default=",".join(ATTACKS),
        help=f"which ones, by name; also {', '.join(IMAGE_ATTACKS)}, with a model that sees, and "
        f"{', '.join(AUDIO_ATTACKS)}, beside a small model that hears",
    )
    parser.add_argument("--server-options", default=shlex.join(SERVER_OPTIONS))
    parser.add_argument("--http-processes", type=int, default=1, help="--api-server-count")
    args = parser.parse_args()
    keys = [HOSTILE_KEY, *(normal_key(i) for i in range(NUM_NORMAL))]
    options = [part for key in keys for part in ("--api-key", key)]
    options += ["--api-server-count", str(args.http_processes)]
    names = args.attacks.split(",")
    if unknown := set(names) - ATTACKS.keys() - IMAGE_ATTACKS.keys() - AUDIO_ATTACKS.keys():
        parser.error(f"there is no attack {', '.join(sorted(unknown))}")
    cases = {name: [name] for name in names} | ({"all": names} if len(names) > 1 else {})
    options += shlex.split(args.server_options)
    with serving(args.model, options, hears=bool(AUDIO_ATTACKS.keys() & names)) as server:
        run_phase(server, 3.0)
        result = measure(server, cases, args.rounds, args.seconds)
        if result.failures:
            print(server.log_tail())
    details = {
        "failures": result.failures[:20],
        "load_average_before_each_phase": result.loads,
        "server_options": args.server_options,
    }
    suffix = f"_{args.http_processes}_http_processes" if args.http_processes > 1 else ""
    if names == list(AUDIO_ATTACKS):
        suffix = f"_audio{suffix}"
    return conclude(f"hostile{suffix}", checks_of(result), details)


@contextlib.contextmanager
def serving(model: Path | None, options: list[str], *, hears: bool) -> Iterator[Server]:
    """Run a server of a model, and of a small one that hears if there are recordings."""
    if not hears:
        with mlx_parallm_server(model, options) as server:
            yield server
        return
    with tempfile.TemporaryDirectory() as folder:
        models = {
            SERVED_NAME: model or Path(DEMO_NAME),
            SPEECH: write_speech(Path(folder) / SPEECH),
        }
        with server_of_models(models, options) as server:
            yield server


def measure(server: Server, cases: dict[str, list[str]], rounds: int, seconds: float) -> Result:
    """Measure phases alone and beside each attack, in turns."""
    before = peak = server.resident_bytes()
    result = Result(Phase(), {name: Phase() for name in cases})
    for _ in range(rounds):
        result.loads.append(round(os.getloadavg()[0], 1))
        add(result.alone, run_phase(server, seconds))
        for name, attacks in cases.items():
            result.loads.append(round(os.getloadavg()[0], 1))
            idle, refused = server.resident_bytes(), num_refused(server)
            with attackers(server, attacks):
                time.sleep(BEGIN_S)
                add(result.beside[name], run_phase(server, seconds))
                peak = max(peak, server.resident_bytes())
            time.sleep(SETTLE_S)
            result.refused[name] += num_refused(server) - refused
            kept = server.resident_bytes() / idle
            result.kept[name] = max(kept, result.kept.get(name, 0.0))
    result.grown_bytes = peak - before
    return result


def num_refused(server: Server) -> int:
    """Return how many requests were refused; those of normal clients are not."""
    return len(REFUSED.findall(server.log.read_text(errors="replace")))


def checks_of(result: Result) -> list[Check]:
    """Return the table of all kinds of phases, and then the figures of all of them."""
    alone = result.alone
    checks = phase_checks("alone", alone)
    for name, phase in result.beside.items():
        checks += phase_checks(name, phase)
        checks.append(
            Check(f"{name}: TTFT p99 relative to alone", ratio(phase, alone), "<=", MOST_RATIO)
        )
        checks += stall_checks(name, phase, alone, result.kept[name])
        checks.append(Check(f"{name}: refused requests", result.refused[name]))
    has_media = any(attack in name for name in result.beside for attack in MEDIA_ATTACKS)
    most_growth = MOST_MEDIA_GROWTH_BYTES if has_media else MOST_GROWTH_BYTES
    mean_load = sum(result.loads) / len(result.loads)
    return [
        *checks,
        Check("failures of normal clients", len(result.failures), "==", 0),
        Check("growth of memory, MiB", result.grown_bytes / 2**20, "<=", most_growth / 2**20),
        Check("load average of the machine, mean", mean_load),
    ]


def phase_checks(name: str, phase: Phase) -> list[Check]:
    return [
        Check(f"{name}: requests", len(phase.first_token_s), ">=", 1),
        Check(f"{name}: TTFT p50, ms", 1e3 * percentile(phase.first_token_s, 50)),
        Check(f"{name}: TTFT p99, ms", 1e3 * percentile(phase.first_token_s, 99)),
    ]


def stall_checks(name: str, phase: Phase, alone: Phase, kept: float) -> list[Check]:
    """Return checks that nothing stalled; they have a limit only for attacks of long texts."""
    gaps = percentile(phase.gaps_s, 99) / percentile(alone.gaps_s, 99)
    health_ms = 1e3 * percentile(phase.health_s, 99)
    figures = [
        (f"{name}: gap p99 relative to alone", gaps, MOST_RATIO),
        (f"{name}: /health p99, ms", health_ms, 1e3 * MOST_HEALTH_S),
        (f"{name}: memory after, relative to before", kept, MOST_KEPT),
    ]
    if name not in ("texts", *MEDIA_ATTACKS):
        return [Check(label, value) for label, value, _ in figures]
    return [Check(label, value, "<=", most) for label, value, most in figures]


def add(phase: Phase, more: Phase) -> None:
    phase.first_token_s += more.first_token_s
    phase.gaps_s += more.gaps_s
    phase.health_s += more.health_s
    phase.failures += more.failures


def ratio(beside: Phase, alone: Phase) -> float:
    return percentile(beside.first_token_s, 99) / percentile(alone.first_token_s, 99)


def percentile(values: list[float], share: float) -> float:
    """Return the nearest-rank percentile; NaN if there are no values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share / 100))]


def normal_key(number: int) -> str:
    return f"normal-{number}"


def run_phase(server: Server, seconds: float) -> Phase:
    """Let the normal clients ask one thing after another for some time."""
    phase = Phase()
    until_s = time.monotonic() + seconds
    threads = [
        threading.Thread(target=ask_until, args=(server.base_url, number, until_s, phase))
        for number in range(NUM_NORMAL)
    ]
    threads.append(
        threading.Thread(target=ask_health_until, args=(server.base_url, until_s, phase))
    )
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return phase


def ask_health_until(base_url: str, until_s: float, phase: Phase) -> None:
    address = urlsplit(base_url)
    while time.monotonic() < until_s:
        time.sleep(HEALTH_PAUSE_S)
        begin_s = time.perf_counter()
        connection = http.client.HTTPConnection(
            address.hostname or "", address.port, timeout=TIMEOUT_S
        )
        try:
            with closing(connection):
                connection.request("GET", "/health")
                connection.getresponse().read()
            phase.health_s.append(time.perf_counter() - begin_s)
        except (OSError, http.client.HTTPException) as cause:
            phase.failures.append(f"/health: {cause!r}")


def ask_until(base_url: str, number: int, until_s: float, phase: Phase) -> None:
    draw = random.Random(number)
    cases = [case for case in make_cases(SERVED_NAME, seed=number) if case.name == "chat"]
    while time.monotonic() < until_s:
        time.sleep(draw.uniform(0, MAX_PAUSE_S))
        try:
            body = draw.choice(cases).body | {"min_tokens": MIN_TOKENS}
            first, gaps = timed_answer(base_url, normal_key(number), body)
            phase.first_token_s.append(first)
            phase.gaps_s += gaps
        except (OSError, http.client.HTTPException, ValueError) as cause:
            phase.failures.append(repr(cause))


def timed_answer(base_url: str, key: str, body: dict[str, Any]) -> tuple[float, list[float]]:
    """Return the seconds to the first event with text, and between such events.

    Raises:
        ValueError: the answer is an error, or has no text.
    """
    address = urlsplit(base_url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=TIMEOUT_S)
    with closing(connection):
        begin_s = time.perf_counter()
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"status {response.status}: {response.read(300)!r}")
        times = [time.perf_counter() for line in response if TEXT.search(line)]
        if not times:
            raise ValueError("no text")
        return times[0] - begin_s, [after - before for before, after in pairwise(times)]


class attackers:  # noqa: N801 - read as a word
    """The hostile client, in a process for each of its attacks."""

    def __init__(self, server: Server, names: list[str]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._processes = [
            spawn.Process(
                target=attack_for,
                args=(name, server.base_url, HOSTILE_KEY, SERVED_NAME),
                daemon=True,
            )
            for name in names
            if name
        ]

    def __enter__(self) -> None:
        for process in self._processes:
            process.start()

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()


if __name__ == "__main__":
    sys.exit(main())
