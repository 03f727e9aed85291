"""Measure losses of generated texts: both perturbed adapters of a step in one batch, or in turn.

``python -m benchmarks.mezo_generation`` asks a training session of the embedded generator for the
two adapters of a step, and samples all prompts with each: at the same time, so that both signs run
in one continuous batch, and one sign after the other. ``--model FOLDER`` measures another
generator, also on a GPU; ``--targets`` names the linear layers that it trains.
"""

from __future__ import annotations

import shlex
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2

from benchmarks.checks import Check, conclude
from benchmarks.measure import make_parser
from benchmarks.servers import SERVED_NAME, Server, mlx_parallm_server


def main() -> int:
    parser = make_parser(__doc__)
    parser.set_defaults(model=None, repetitions=5)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--targets", default="q_proj,v_proj")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as data:
        options = ["--data-dir", data, *shlex.split(args.server_options)]
        with mlx_parallm_server(args.model, options) as server:
            seconds = measure(server, args)
    together, in_turn = (statistics.median(seconds[name]) for name in ("together", "in turn"))
    checks = [
        Check("both signs in one batch: seconds", together),
        Check("one sign after the other: seconds", in_turn),
        Check("in turn over together", in_turn / together),
    ]
    return conclude("mezo_generation", checks, {"seconds": seconds})


def measure(server: Server, args: Any) -> dict[str, list[float]]:
    """Return the seconds of the losses of steps, in either way, in alternation."""
    trainable = {"targets": args.targets.split(","), "rank": args.rank}
    body = {"model": SERVED_NAME, "trainable": trainable, "objective": {"kind": "caller"}}
    seconds: dict[str, list[float]] = {"together": [], "in turn": []}
    with httpx2.Client(base_url=server.base_url, timeout=600) as client:
        session = f"/v1/mezo/sessions/{answer_of(client, '/v1/mezo/sessions', body)['id']}"
        for repetition in range(args.repetitions + 1):
            for name, count in (("together", 2), ("in turn", 1)):
                adapters = answer_of(client, f"{session}/ask")["data"]
                bodies = [rollout_of(adapter["name"], args) for adapter in adapters]
                begin_s = time.perf_counter()
                with ThreadPoolExecutor(count) as pool:
                    list(pool.map(lambda each: answer_of(client, "/v1/rl/rollout", each), bodies))
                # The first repetition prepares the adapters' layers and the shapes.
                if repetition:
                    seconds[name].append(time.perf_counter() - begin_s)
                answer_of(client, f"{session}/tell", {"losses": [0.0, 0.0]})
        client.delete(session)
    return seconds


def rollout_of(adapter: str, args: Any) -> dict[str, Any]:
    """Return a rollout whose samples all have the same length."""
    prompts = [f"Story {number}: once upon a time" for number in range(args.prompts)]
    return {
        "model": adapter,
        "prompts": prompts,
        "max_tokens": args.max_tokens,
        "ignore_eos": True,
        "seed": 1,
    }


def answer_of(
    client: httpx2.Client, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the answer of a POST."""
    return client.post(path, json=body).raise_for_status().json()


if __name__ == "__main__":
    raise SystemExit(main())
