"""The difference of log-probabilities reported while sampling from scores of the same tokens.

``python -m benchmarks.logprob_agreement --server-options "--dtype bfloat16"``. Samples groups by
``/v1/rl/rollout`` at temperature 1, and scores them by ``/v1/rl/logprobs`` without the prefix cache
of the rollout, so that every token is computed in another batch and in chunks. The result has the
dtype that the server computes in.
"""

from __future__ import annotations

import shlex
import sys
from typing import Any

import httpx2

from benchmarks.checks import Check, conclude
from benchmarks.measure import make_parser
from benchmarks.servers import Server, mlx_parallm_server

TIMEOUT_S = 3600
PROMPTS = [
    *(
        [{"role": "user", "content": f"What is {a} + {b}?"}]
        for a, b in [(17, 25), (103, 58), (9, 9)]
    ),
    [{"role": "user", "content": "Sort these numbers: 9 4 7 1"}],
    [{"role": "user", "content": "Tell me about yourself and what you can do."}],
    "Once upon a time there was a small house by the river, and in it lived",
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 " * 4,
    "The quick brown fox jumps over the lazy dog. " * 6,
]


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.set_defaults(model=None)
    args = parser.parse_args()
    with mlx_parallm_server(args.model, shlex.split(args.server_options)) as server:
        dtype = dtype_of(server)
        differences = sorted(measure(server, args.group, args.output_tokens))
    checks = [
        Check("tokens", len(differences)),
        Check("mean", sum(differences) / len(differences)),
        Check("median", differences[len(differences) // 2]),
        Check("p99", differences[len(differences) * 99 // 100]),
        Check("maximum", differences[-1]),
    ]
    for check in checks[1:]:
        print(f"{check.what}: {check.value:.3g}")
    return conclude(f"logprob_agreement_{dtype}", checks, {"options": args.server_options})


def dtype_of(server: Server) -> str:
    """Return the dtype of the first model."""
    response = httpx2.get(server.base_url + "/v1/rl/capabilities")
    response.raise_for_status()
    return response.json()["models"][0]["dtype"]


def measure(server: Server, group: int, output_tokens: int) -> list[float]:
    """Return absolute differences, one per token."""
    rollout = post(
        server,
        "/v1/rl/rollout",
        prompts=PROMPTS,
        n=group,
        max_tokens=output_tokens,
        seed=1,
        ignore_eos=True,
        logprobs_mode="raw_logprobs",
        cache_salt="rollout",
    )
    samples = [(group, sample) for group in rollout["groups"] for sample in group["samples"]]
    items = [
        {
            "prompt_token_ids": group["prompt_token_ids"],
            "completion_token_ids": sample["token_ids"],
        }
        for group, sample in samples
    ]
    scores = post(server, "/v1/rl/logprobs", items=items, cache_salt="scores")["items"]
    return [
        abs(sampled - scored)
        for (_, sample), score in zip(samples, scores, strict=True)
        for sampled, scored in zip(sample["logprobs"], score["logprobs"], strict=True)
    ]


def post(server: Server, path: str, **body: Any) -> Any:
    response = httpx2.post(server.base_url + path, json=body, timeout=TIMEOUT_S)
    response.raise_for_status()
    return response.json()


if __name__ == "__main__":
    sys.exit(main())
