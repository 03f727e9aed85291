"""Adapters that are replaced by uploads, again and again, while requests run with them.

``python -m loadtests.swaps`` serves the embedded model. Streams and rollouts of two adapters and
streams of the base run all the time; between good uploads come truncated ones, NaN, wrong shapes,
and clients that are killed amid their upload. The exit status is 0 when no request failed that
should not, every output is that of the versions which it names, and nothing is left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from benchmarks.checks import Check, conclude
from benchmarks.servers import SERVED_NAME, Server, mlx_parallm_server
from loadtests.run import read_gauge, wait_until_idle
from loadtests.swap_clients import POLICIES, STREAM_TOKENS, Clients, Fresh, Policy, fresh_outputs
from loadtests.swap_replay import Replay
from loadtests.swap_samples import (
    MOST_ERROR,
    Sample,
    version_label,
    version_number,
    wrong_spans,
    wrong_tokens,
)
from loadtests.swap_uploads import (
    BAD_KINDS,
    KILLED,
    ROUTE,
    bad_body,
    good_body,
    query,
    upload_and_die,
)

TIMEOUT_S = 120.0
RAW = {"content-type": "application/octet-stream"}
# PACE_S: seconds between two uploads.
PACE_S = 0.1
# WARM_SWAPS: uploads before memory is measured. GOOD_PER_BAD: good uploads between two bad ones.
WARM_SWAPS, GOOD_PER_BAD = 20, 4
FRESH = "fresh"
MIB = 1 << 20
MOST_ACTIVE_GROWTH, MOST_RSS_GROWTH = 1 * MIB, 32 * MIB
NOTHING_LEFT = ("adapters_running", "adapter_slots_used", "adapters_loaded")


@dataclass(slots=True)
class Result:
    """The results; memory is ``(resident, MLX's active)`` in bytes, on the idle server."""

    samples: list[Sample] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    num_swaps: int = 0
    bad: list[str] = field(default_factory=list)
    live_s: list[float] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)
    wrong_spans: list[str] = field(default_factory=list)
    wrong_tokens: list[str] = field(default_factory=list)
    num_compared: int = 0
    replay_errors: list[float] = field(default_factory=list)
    left: dict[str, float] = field(default_factory=dict)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--swaps", type=int, default=120, help="after the first 20 that warm up")
    parser.add_argument("--streams", type=int, default=3, help="of each adapter and of the base")
    parser.add_argument(
        "--checked", type=int, default=40, help="versions whose tokens are compared; 0: all"
    )
    parser.add_argument("--server-options", default="", help="more flags for the server")
    args = parser.parse_args()
    with mlx_parallm_server(None, shlex.split(args.server_options)) as server:
        result = asyncio.run(measure(server, args.swaps, args.streams, args.checked))
        if result.failures:
            print(server.log_tail())
    details = {
        "failures": result.failures[:20],
        "wrong_spans": result.wrong_spans[:20],
        "wrong_tokens": result.wrong_tokens[:20],
        "memory": result.memory,
        "server_options": args.server_options,
    }
    return conclude("swaps", checks_of(result), details)


async def measure(server: Server, swaps: int, streams: int, checked: int) -> Result:
    """Warm up, replace adapters in two halves, and compare the samples with fresh requests."""
    result = Result()
    policies = {name: Policy(name) for name in POLICIES}
    async with httpx2.AsyncClient(
        base_url=server.base_url, timeout=TIMEOUT_S, limits=httpx2.Limits(max_connections=None)
    ) as http:
        numbers = itertools.count()
        for policy in policies.values():
            await upload(http, policy, next(numbers))
        result.live_s.clear()
        for part in (WARM_SWAPS, swaps - swaps // 2, swaps // 2):
            await under_load(server, http, policies, numbers, part, streams, result)
            print(f"{result.num_swaps} swaps, {len(result.samples)} outputs", flush=True)
            await asyncio.to_thread(wait_until_idle, server)
            result.memory.append(memory_of(server))
        await compare(http, policies, checked, result)
        for name in (*POLICIES, FRESH):
            response = await http.delete(f"/v1/adapters/{name}")
            response.raise_for_status()
        await asyncio.to_thread(wait_until_idle, server)
    result.left = await asyncio.to_thread(wait_until_idle, server)
    result.left |= {name: read_gauge(server, f"mlx_parallm:{name}") for name in NOTHING_LEFT}
    return result


async def under_load(
    server: Server,
    http: httpx2.AsyncClient,
    policies: dict[str, Policy],
    numbers: itertools.count[int],
    swaps: int,
    streams: int,
    result: Result,
) -> None:
    """Replace the adapters in turn while requests run; then let the requests end."""
    clients = Clients(http, policies)
    running = asyncio.create_task(clients.run(streams))
    kinds = itertools.cycle(BAD_KINDS)
    try:
        for turn, policy in zip(range(swaps), itertools.cycle(policies.values()), strict=False):
            await asyncio.sleep(PACE_S)
            result.live_s.append(await upload(http, policy, next(numbers)))
            result.num_swaps += 1
            if turn % GOOD_PER_BAD == GOOD_PER_BAD - 1:
                kind = next(kinds)
                await upload_bad(server, http, policy, kind, next(numbers))
                result.bad.append(kind)
    finally:
        clients.is_stopped = True
        await running
    result.samples += clients.samples
    result.failures += clients.failures


async def upload(http: httpx2.AsyncClient, policy: Policy, seed: int) -> float:
    """Replace an adapter; seconds until the answer.

    Raises:
        httpx2.HTTPStatusError: the upload was refused.
    """
    number = policy.sent + 1
    body = await asyncio.to_thread(good_body, seed)
    policy.seeds[number] = seed
    policy.sent = number
    begin_s = time.perf_counter()
    fields = query(policy.name, version_label(number))
    response = await http.post(ROUTE, content=body, params=fields, headers=RAW)
    took_s = time.perf_counter() - begin_s
    response.raise_for_status()
    policy.live = number
    return took_s


async def upload_bad(
    server: Server, http: httpx2.AsyncClient, policy: Policy, kind: str, seed: int
) -> None:
    """Send what cannot be used.

    Raises:
        AssertionError: it was not refused, or another version than before is there.
    """
    before = await told_of(http, policy)
    body = await asyncio.to_thread(bad_body, kind, seed)
    fields = query(policy.name, "bad")
    if kind == KILLED:
        await asyncio.to_thread(upload_and_die, server.base_url, fields, body)
    else:
        response = await http.post(ROUTE, content=body, params=fields, headers=RAW)
        assert response.status_code == 400, f"{kind}: {response.status_code} {response.text}"
    after = await told_of(http, policy)
    assert after == before == (version_label(policy.live), before[1]), f"{kind}: {before} {after}"


async def told_of(http: httpx2.AsyncClient, policy: Policy) -> tuple[str, str]:
    """Return the version that serves, and the digest of its tensors."""
    card = (await http.get(f"/v1/adapters/{policy.name}")).raise_for_status().json()
    return card["version"], card["digest"]


async def compare(
    http: httpx2.AsyncClient, policies: dict[str, Policy], checked: int, result: Result
) -> None:
    """Find what is wrong with the samples.

    Fresh requests say what tokens the first version of a sample gives; what later ones give behind
    the KV of those before is found by a replay with mlx_lm.
    """
    first: dict[tuple[str | None, str], list[Sample]] = {}
    replay = Replay()
    for sample in result.samples:
        why = wrong_spans(sample)
        if why is not None:
            result.wrong_spans.append(why)
            continue
        first.setdefault((sample.policy, sample.output.spans[0].version), []).append(sample)
        seeds = policies[sample.policy].seeds if sample.policy else {}
        # This runs on the thread that loaded the model, as MLX requires; nothing else runs.
        result.replay_errors.append(replay.error(sample, seeds))
    versions = sorted((key for key in first if key[0]), key=str)
    base = [key for key in first if key[0] is None]
    for name, label in base + versions[:: max(1, len(versions) // checked) if checked else 1]:
        fresh = await fresh_of(http, policies[name] if name else None, label)
        for sample in first[name, label]:
            wanted = fresh[is_stream(sample), sample.case, sample.index]
            why = wrong_tokens(sample.output, wanted)
            result.wrong_tokens += [] if why is None else [f"{name} {label}: {why}"]
            result.num_compared += 1


def is_stream(sample: Sample) -> bool:
    """True if a sample is a stream's, not a rollout's, whose samples are shorter."""
    return len(sample.output.token_ids) == STREAM_TOKENS


async def fresh_of(http: httpx2.AsyncClient, policy: Policy | None, label: str) -> Fresh:
    """Return the answers of a version that is uploaded under another name."""
    if policy is None:
        return await fresh_outputs(http, SERVED_NAME, "fresh-base")
    number = version_number(label)
    assert number is not None, f"{label} is no version of an adapter"
    body = await asyncio.to_thread(good_body, policy.seeds[number])
    response = await http.post(ROUTE, content=body, params=query(FRESH, label), headers=RAW)
    response.raise_for_status()
    return await fresh_outputs(http, f"{SERVED_NAME}:{FRESH}", f"fresh-{policy.name}-{label}")


def memory_of(server: Server) -> tuple[int, int]:
    """Return the resident bytes of the process, and the bytes of MLX's arrays."""
    return server.resident_bytes(), int(read_gauge(server, "mlx_parallm:active_memory_bytes"))


def checks_of(result: Result) -> list[Check]:
    """Return the table."""
    straddling = sum(len(sample.output.spans) > 1 for sample in result.samples)
    names = ("start", "middle", "end")
    resident, active = zip(*result.memory, strict=True)
    return [
        Check("swaps under load", result.num_swaps, ">=", 100),
        Check("time from an upload to serving, ms: median", 1e3 * _median(result.live_s)),
        *(Check(f"bad uploads: {kind}", result.bad.count(kind), ">=", 1) for kind in BAD_KINDS),
        Check("outputs", len(result.samples), ">=", 1),
        Check("outputs of more than one version", straddling, ">=", 1),
        Check("requests that failed", len(result.failures), "==", 0),
        Check("outputs with wrong spans", len(result.wrong_spans), "==", 0),
        Check("outputs compared with fresh requests", result.num_compared, ">=", 1),
        Check("outputs with a wrong token", len(result.wrong_tokens), "==", 0),
        Check("outputs replayed with mlx_lm", len(result.replay_errors), ">=", 1),
        Check("largest error of a log-probability", max(result.replay_errors), "<=", MOST_ERROR),
        *(
            Check(f"resident at the {name}, MiB", num_bytes / MIB)
            for name, num_bytes in zip(names, resident, strict=True)
        ),
        Check(
            "growth of resident memory, MiB",
            (resident[-1] - resident[0]) / MIB,
            "<=",
            MOST_RSS_GROWTH / MIB,
        ),
        *(
            Check(f"MLX's arrays at the {name}, MiB", num_bytes / MIB)
            for name, num_bytes in zip(names, active, strict=True)
        ),
        Check(
            "growth of MLX's arrays, MiB",
            (active[-1] - active[0]) / MIB,
            "<=",
            MOST_ACTIVE_GROWTH / MIB,
        ),
        *(Check(f"{name} at the end", value, "==", 0) for name, value in result.left.items()),
    ]


def _median(values: Sequence[float]) -> Any:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    sys.exit(main())
