"""Measure prompts whose KV comes from a peer, over the loopback interface and over slow links.

``python -m benchmarks.kv_peer``, with the embedded model. A peer computes prompts; servers without
a peer, with it, and with it behind a link that is held to a rate answer them in turns. Rates are
those of 10 and 1 GbE for an 8B model on an M3 Ultra, scaled to this model: sending a token takes
0.17 and 1.6 times as long as computing it. Tokens and log-probabilities are compared.
"""

from __future__ import annotations

import statistics
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict

from benchmarks.checks import Check, conclude
from benchmarks.kv_disk import Answer, ask
from benchmarks.kv_disk_server import BLOCK_SIZE, metric, random_ids
from benchmarks.paced_proxy import PacedProxy
from benchmarks.servers import Server, mlx_parallm_server

WARM_UP_TOKENS = 600
# FAST, SLOW: seconds of sending over seconds of computing.
FAST, SLOW = 0.17, 1.6
KEY = ("--kv-cache-memory-bytes", "512MiB")
POLL_S = 0.1


def main() -> int:
    parser = ArgumentParser(
        prog="python -m benchmarks.kv_peer",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    args = parser.parse_args()
    count = 2 + 2 * args.num_prompts
    prompts = [random_ids(args.prompt_tokens, number) for number in range(count)]
    with ExitStack() as stack:
        peer = stack.enter_context(mlx_parallm_server(None, [*KEY, "--kv-serve"]))
        port = int(peer.base_url.rpartition(":")[2].partition("/")[0])
        links = {"loopback": PacedProxy(port), "fast": PacedProxy(port), "slow": PacedProxy(port)}
        servers = {"cold": stack.enter_context(mlx_parallm_server(None, list(KEY)))} | {
            name: stack.enter_context(mlx_parallm_server(None, [*KEY, "--kv-peers", link.url]))
            for name, link in links.items()
        }
        answers = measured(peer, servers, links, prompts)
    return conclude("kv_peer", checks_of(answers, args.prompt_tokens), details_of(answers))


def measured(
    peer: Server,
    servers: dict[str, Server],
    links: dict[str, PacedProxy],
    prompts: Sequence[Sequence[int]],
) -> dict[str, list[Answer]]:
    """Return the answers of the servers to all prompts but two, by which they learn their pace."""
    answers: dict[str, list[Answer]] = {name: [] for name in servers}
    computed: list[Answer] = []
    for server in servers.values():
        ask(server, random_ids(WARM_UP_TOKENS, 1000))
        computed.append(ask(server, prompts[0]))
    compute_s = median_first(computed)
    answers["peer"] = [ask(peer, prompt) for prompt in prompts[1:]]
    answers["memory"] = [ask(peer, prompt) for prompt in prompts[2:]]
    num_blocks = (len(prompts) - 1) * (len(prompts[0]) // BLOCK_SIZE)
    for name in links:
        while metric(servers[name], "mlx_parallm:kv_tier_blocks") < 0.95 * num_blocks:
            time.sleep(POLL_S)
    ask(servers["loopback"], prompts[1])
    block_bytes = metric(servers["loopback"], "mlx_parallm:kv_tier_read_bytes_total")
    links["fast"].rate = block_bytes / (FAST * compute_s)
    links["slow"].rate = block_bytes / (SLOW * compute_s)
    ask(servers["fast"], prompts[1])
    half = 2 + (len(prompts) - 2) // 2
    for prompt in prompts[2:half]:
        for name in ("cold", "loopback", "fast"):
            answers[name].append(said(name, ask(servers[name], prompt)))
    # It is learnt in vain that the link does not pay, and tried again after 30 s, then 60.
    ask(servers["slow"], prompts[1])
    answers["beside slow"] = []
    for prompt in prompts[half:]:
        answers["slow"].append(said("slow", ask(servers["slow"], prompt)))
        answers["beside slow"].append(said("cold", ask(servers["cold"], prompt)))
    return answers


def said(name: str, answer: Answer) -> Answer:
    print(f"{name:<9} {1e3 * answer.first_s:6.0f} ms", flush=True)
    return answer


def checks_of(answers: dict[str, list[Answer]], num_tokens: int) -> list[Check]:
    """Return what is checked of the answers."""
    cold = median_first(answers["cold"])
    ratios = {
        name: statistics.median(
            each.first_s / other.first_s
            for each, other in zip(answers[name], answers[beside], strict=True)
        )
        for name, beside in (("loopback", "cold"), ("fast", "cold"), ("slow", "beside slow"))
    }
    memory = answers["memory"][: len(answers["loopback"])]
    most = num_tokens // BLOCK_SIZE * BLOCK_SIZE
    return [
        Check("TTFT computed, ms", 1e3 * cold),
        *(Check(f"TTFT, {name}, ms", 1e3 * median_first(answers[name])) for name in ratios),
        Check("loopback over computed", ratios["loopback"], "<=", 0.4),
        Check("10 GbE, scaled, over computed", ratios["fast"], "<=", 0.4),
        Check("1 GbE, scaled, over computed", ratios["slow"], "<=", 1.05),
        Check(
            "least share of a prompt from the peer", least(answers["loopback"]) / most, ">=", 0.99
        ),
        Check(
            "tokens from the peer over 1 GbE", max(each.cached_tokens for each in answers["slow"])
        ),
        Check(
            "answers other than from memory",
            num_other(answers["loopback"], memory),
            "==",
            0,
        ),
        Check(
            "answers other than from memory, 10 GbE",
            num_other(answers["fast"], memory),
            "==",
            0,
        ),
    ]


def median_first(answers: Sequence[Answer]) -> float:
    return statistics.median(each.first_s for each in answers)


def least(answers: Sequence[Answer]) -> int:
    return min(each.cached_tokens for each in answers)


def num_other(answers: Sequence[Answer], wanted: Sequence[Answer]) -> int:
    """Return how many answers have other tokens or log-probabilities."""
    pairs = zip(answers, wanted, strict=True)
    return sum((a.token_ids, a.logprobs) != (b.token_ids, b.logprobs) for a, b in pairs)


def details_of(answers: dict[str, list[Answer]]) -> dict[str, object]:
    return {name: [asdict(each) for each in rows] for name, rows in answers.items()}


if __name__ == "__main__":
    sys.exit(main())
