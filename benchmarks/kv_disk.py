"""Measure prompts that come back from a disk: after a restart, after a kill, beside streams.

``python -m benchmarks.kv_disk``, with the embedded model. Its parts, all by default:

- ``restart``: prompts computed by a server without a store and by one with an empty store, in
  turns; then from memory; then, after SIGTERM and a new start, from the disk. Their tokens and
  log-probabilities are compared.
- ``kill``: the same with SIGKILL right after the last answer.
- ``streams``: prompts that are evicted and come back beside streams, with a store and without.
- ``traffic``: short prompts, while the store is at its limit, with a store and without, in turns.
  ``--num-requests 10000`` is the full run.

Times of a busy machine vary, so processor time of the server stands beside them.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
import urllib.request
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.checks import Check, conclude
from benchmarks.kv_disk_load import streams_part, traffic_part
from benchmarks.kv_disk_server import BLOCK_SIZE, disk_server, random_ids
from benchmarks.servers import Server

NEW_TOKENS = 24
WARM_UP_TOKENS = 600
# SETTLE_S: seconds in which an idle server writes what it has to write.
SETTLE_S = 2.5
# LOST_S: blocks of so many last seconds may be lost by SIGKILL.
LOST_S = 2.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A streamed completion.

    Attributes:
        first_s: seconds until its first token.
        processor_s: processor time of the server until then.
        end_s: when it ended, on the client's clock.
        cached_tokens: prompt tokens that were not computed.
        token_ids: its tokens.
        logprobs: theirs.
    """

    first_s: float
    processor_s: float
    end_s: float
    cached_tokens: int
    token_ids: list[str]
    logprobs: list[float]


def ask(server: Server, prompt: Sequence[int]) -> Answer:
    """Return the greedy continuation of token ids."""
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_tokens_as_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{server.base_url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    tokens, logprobs, usage = list[str](), list[float](), dict[str, Any]()
    before_s, started = server.processor_s(), time.perf_counter()
    first_s = used_s = 0.0
    with urllib.request.urlopen(request) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            usage = chunk.get("usage") or usage
            if not first_s:
                first_s = time.perf_counter() - started
                used_s = server.processor_s() - before_s
            for choice in chunk["choices"]:
                if entry := choice.get("logprobs"):
                    tokens += entry["tokens"]
                    logprobs += entry["token_logprobs"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(first_s, used_s, time.perf_counter(), cached, tokens, logprobs)


def main() -> int:
    parser = ArgumentParser(
        prog="python -m benchmarks.kv_disk",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--num-streams", type=int, default=32)
    parser.add_argument("--num-requests", type=int, default=800, help="of the part traffic")
    parser.add_argument("--repetitions", type=int, default=1, help="of the part streams")
    parser.add_argument("--folder", type=Path, help="parent of the stores' folders")
    args = parser.parse_args()
    checks: list[Check] = []
    details: dict[str, Any] = {}
    for part in args.parts:
        with tempfile.TemporaryDirectory(prefix="kv-disk-", dir=args.folder) as folder:
            measured, details[part] = PARTS[part](args, Path(folder))
        checks += measured
    return conclude("kv_disk", checks, details)


def restart_part(args: Namespace, folder: Path) -> tuple[list[Check], dict[str, Any]]:
    """Compare answers of an empty store, of memory and of the disk."""
    prompts = [random_ids(args.prompt_tokens, number) for number in range(args.num_prompts)]
    with disk_server(None) as off, disk_server(folder) as on:
        warm_up(off, on)
        cold, empty, whole = in_turns(off, on, prompts)
        memory = said("memory", [ask(on, prompt) for prompt in prompts])
        time.sleep(SETTLE_S)
    with disk_server(folder) as on:
        warm_up(on)
        disk = said("disk", [ask(on, prompt) for prompt in prompts])
        again = said("memory, after the disk", [ask(on, prompt) for prompt in prompts])
    computed_s = median_used(cold)
    writing_s = statistics.median(
        (whole_on - before_on.processor_s) - (whole_off - before_off.processor_s)
        for (whole_off, whole_on), before_off, before_on in zip(whole, cold, empty, strict=True)
    )
    checks = [
        Check("TTFT computed, ms", 1e3 * median_first(cold)),
        Check("TTFT computed, an empty store, ms", 1e3 * median_first(empty)),
        Check("TTFT from memory, ms", 1e3 * median_first(memory)),
        Check("TTFT from disk after a restart, ms", 1e3 * median_first(disk)),
        Check("TTFT from disk over computed", median_first(disk) / median_first(cold), "<=", 0.12),
        Check("processor time computed, ms", 1e3 * median_used(cold)),
        Check("processor time from disk, ms", 1e3 * median_used(disk)),
        Check(
            "processor time from disk over computed",
            median_used(disk) / median_used(cold),
            "<=",
            0.12,
        ),
        Check("processor time, an empty store over none", used_ratio(empty, cold), "<=", 1.03),
        Check("processor time of writing over computing", writing_s / computed_s),
        Check("least share of a prompt from disk", least_share(disk, args), ">=", 0.99),
        *exactness(cold, empty, memory, disk, again),
    ]
    answers = {"cold": cold, "empty": empty, "memory": memory, "disk": disk}
    record = {name: [asdict(each) for each in list_] for name, list_ in answers.items()}
    return checks, record | {"processor_s": whole}


def kill_part(args: Namespace, folder: Path) -> tuple[list[Check], dict[str, Any]]:
    """Count what is found after SIGKILL."""
    prompts = [random_ids(args.prompt_tokens, number) for number in range(args.num_prompts)]
    with disk_server(folder) as server:
        warm_up(server)
        cold = said("computed", [ask(server, prompt) for prompt in prompts])
        server.kill()
        killed_s = time.perf_counter()
    with disk_server(folder) as server:
        warm_up(server)
        disk = said("disk, after SIGKILL", [ask(server, prompt) for prompt in prompts])
    kept = [back for old, back in zip(cold, disk, strict=True) if killed_s - old.end_s > LOST_S]
    late = [back for old, back in zip(cold, disk, strict=True) if killed_s - old.end_s <= LOST_S]
    lost = sum(findable(args) - back.cached_tokens for back in late) / BLOCK_SIZE
    return [
        Check(
            "SIGKILL: least share of a prompt of before the last 2 s",
            least_share(kept, args),
            ">=",
            0.99,
        ),
        Check("SIGKILL: lost blocks of the last 2 s", lost),
        Check("SIGKILL: blocks of the last 2 s", len(late) * findable(args) / BLOCK_SIZE),
        Check(
            "SIGKILL: answers other than computed",
            sum(old.token_ids != back.token_ids for old, back in zip(cold, disk, strict=True)),
            "==",
            0,
        ),
    ], {"cold": [asdict(each) for each in cold], "disk": [asdict(each) for each in disk]}


def in_turns(
    off: Server, on: Server, prompts: Sequence[Sequence[int]]
) -> tuple[list[Answer], list[Answer], list[tuple[float, float]]]:
    """Ask both servers for each prompt, one after the other; the first one changes.

    Returns:
        The answers of both, and the processor seconds of both until both are idle.
    """
    answers: dict[str, list[Answer]] = {off.base_url: [], on.base_url: []}
    whole: list[tuple[float, float]] = []
    for number, prompt in enumerate(prompts):
        before = off.processor_s(), on.processor_s()
        for server in (off, on) if number % 2 else (on, off):
            answers[server.base_url].append(ask(server, prompt))
        time.sleep(SETTLE_S)
        whole.append((off.processor_s() - before[0], on.processor_s() - before[1]))
    return (
        said("computed", answers[off.base_url]),
        said("computed, an empty store", answers[on.base_url]),
        whole,
    )


def exactness(
    cold: list[Answer],
    empty: list[Answer],
    memory: list[Answer],
    disk: list[Answer],
    again: list[Answer],
) -> list[Check]:
    """Return how many answers differ from those that they must equal."""

    def differing(left: list[Answer], right: list[Answer], what: Callable[[Answer], Any]) -> int:
        return sum(what(mine) != what(other) for mine, other in zip(left, right, strict=True))

    def bits(answer: Answer) -> Any:
        return answer.token_ids, answer.logprobs

    def tokens(answer: Answer) -> Any:
        return answer.token_ids

    largest = max(
        abs(mine - other)
        for left, right in zip(cold, disk, strict=True)
        for mine, other in zip(left.logprobs, right.logprobs, strict=True)
    )
    return [
        Check("disk: answers with other bits than memory", differing(disk, memory, bits), "==", 0),
        Check("memory after disk: the same", differing(again, memory, bits), "==", 0),
        Check(
            "disk: answers with other tokens than computed", differing(disk, cold, tokens), "==", 0
        ),
        Check(
            "empty store: answers with other bits than none", differing(empty, cold, bits), "==", 0
        ),
        Check("disk: largest difference of a log-probability to computed", largest),
    ]


def warm_up(*servers: Server) -> None:
    """Bring servers to their working state."""
    for server in servers:
        for seed in (1, 2, 3):
            ask(server, random_ids(WARM_UP_TOKENS, -seed))


def said(what: str, answers: list[Answer]) -> list[Answer]:
    """Print a line about answers, and return them."""
    cached = sorted({answer.cached_tokens for answer in answers})
    print(f"{what}: TTFT {1e3 * median_first(answers):.0f} ms,", end=" ")
    print(f"processor {1e3 * median_used(answers):.0f} ms, cached {cached}", flush=True)
    return answers


def median_first(answers: Sequence[Answer]) -> float:
    """Return the median time to the first token, in seconds."""
    return statistics.median(answer.first_s for answer in answers)


def median_used(answers: Sequence[Answer]) -> float:
    """Return the median processor time, in seconds."""
    return statistics.median(answer.processor_s for answer in answers)


def used_ratio(answers: Sequence[Answer], others: Sequence[Answer]) -> float:
    """Return the median of the ratios of processor times."""
    pairs = zip(answers, others, strict=True)
    return statistics.median(mine.processor_s / other.processor_s for mine, other in pairs)


def findable(args: Namespace) -> int:
    """Return how many tokens of a prompt can be found again: all blocks but the last token's."""
    return (args.prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


def least_share(answers: Sequence[Answer], args: Namespace) -> float:
    """Return the least share of the findable tokens that were found."""
    return min(answer.cached_tokens for answer in answers) / findable(args)


PARTS: dict[str, Callable[[Namespace, Path], tuple[list[Check], dict[str, Any]]]] = {
    "restart": restart_part,
    "kill": kill_part,
    "streams": streams_part,
    "traffic": traffic_part,
}

if __name__ == "__main__":
    sys.exit(main())
