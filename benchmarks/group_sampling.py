"""Compare ``n=16`` samples of one prompt with 16 concurrent requests to ``mlx_lm.server``.

``python -m benchmarks.group_sampling``. A 512-token prompt, 64 tokens a sample, temperature 0.8.
Both are measured from the first request sent to the last sample complete. The requests to
``mlx_lm.server`` carry no seed: it serves requests with one outside its batch, one at a time.
"""

from __future__ import annotations

import shlex
import statistics
import sys
from pathlib import Path

from benchmarks.checks import Check, conclude
from benchmarks.measure import (
    add_engines,
    completion,
    engine_flags,
    load_tokenizer,
    make_parser,
    name_for,
    prepare_model,
    send_all,
    text_of_tokens,
    warm_up,
)
from benchmarks.servers import Server, mlx_lm_server, mlx_parallm_server
from mlx_parallm.bench.record import PlannedRequest
from mlx_parallm.bench.statistics import summarise


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num-samples", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=64)
    add_engines(parser)
    parser.set_defaults(repetitions=5)
    args = parser.parse_args()
    model = prepare_model(args.model)
    prompts = make_prompts(model, args.prompt_tokens, args.repetitions + 1)
    size, samples = args.output_tokens, args.num_samples
    separate = [
        [completion(index, prompt, size, temperature=0.8) for index in range(samples)]
        for prompt in prompts
    ]
    grouped = [
        [completion(0, prompt, size, temperature=0.8, n=samples, seed=1)] for prompt in prompts
    ]
    with mlx_lm_server(model) as server:
        old = measure(server, separate, samples * size)
    options = [*shlex.split(args.server_options), *engine_flags(args)]
    with mlx_parallm_server(model, options) as server:
        new = measure(server, grouped, samples * size)
    ratio = statistics.median(new) / statistics.median(old)
    checks = [
        Check(f"mlx_lm.server, {samples} requests: tokens/s", statistics.median(old)),
        Check(f"mlx_parallm, n={samples}: tokens/s", statistics.median(new)),
        Check("ratio", ratio, ">=", 4.0),
    ]
    name = name_for("group_sampling", args.engines)
    return conclude(name, checks, {"tokens_per_s": {"old": old, "new": new}})


def make_prompts(model: Path, num_tokens: int, count: int) -> list[str]:
    """Return different prompts of ``num_tokens`` tokens."""
    tokenizer = load_tokenizer(model)
    return [text_of_tokens(tokenizer, num_tokens, seed) for seed in range(count)]


def measure(
    server: Server, groups: list[list[PlannedRequest]], tokens_per_group: int
) -> list[float]:
    """Return tokens/s of each group of requests but the first, which warms up."""
    warm_up(server, 8)
    rates = []
    for group in groups:
        records = send_all(server, group, len(group))
        summary = summarise(records)
        if summary.output_tokens != tokens_per_group:
            raise SystemExit(f"{server.name} made {summary.output_tokens} tokens")
        rates.append(summary.output_tokens_per_s)
        print(f"{server.name:<14} {rates[-1]:7.0f} tokens/s in {summary.duration_s:.2f} s")
    return rates[1:]


if __name__ == "__main__":
    sys.exit(main())
