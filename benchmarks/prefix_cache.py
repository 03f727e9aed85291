"""Measure the savings of the prefix cache, with two requests of the same 1,000-token prefix.

``python -m benchmarks.prefix_cache``. Each pair has a prefix of its own and different endings of
``--suffix-tokens`` tokens; the server is otherwise idle.
"""

from __future__ import annotations

import shlex
import statistics
import sys

from tokenizers import Tokenizer

from benchmarks.checks import Check, conclude
from benchmarks.measure import (
    completion,
    first_text_ms,
    load_tokenizer,
    make_parser,
    prepare_model,
    send_all,
    text_of_tokens,
    warm_up,
)
from benchmarks.servers import Server, mlx_parallm_server
from mlx_parallm.bench.record import RequestRecord


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--prefix-tokens", type=int, default=1000)
    parser.add_argument("--suffix-tokens", type=int, default=16)
    parser.set_defaults(repetitions=9)
    args = parser.parse_args()
    model = prepare_model(args.model)
    tokenizer = load_tokenizer(model)
    with mlx_parallm_server(model, shlex.split(args.server_options)) as server:
        warm_up(server, 4)
        pairs = [
            measure_pair(server, tokenizer, args.prefix_tokens, args.suffix_tokens, 3 * number)
            for number in range(args.repetitions)
        ]
    first = statistics.median(first_text_ms(cold) for cold, _ in pairs)
    second = statistics.median(first_text_ms(two) for _, two in pairs)
    checks = [
        Check("TTFT of the first request, ms", first),
        Check("TTFT of the second request, ms", second),
        Check("ratio", second / first, "<=", 0.25),
        Check("fewest cached prompt tokens", min(two.cached_tokens for _, two in pairs), ">=", 1),
    ]
    times = [[first_text_ms(cold), first_text_ms(cached)] for cold, cached in pairs]
    return conclude("prefix_cache", checks, {"ttft_ms": times})


def measure_pair(
    server: Server, tokenizer: Tokenizer, prefix_tokens: int, suffix_tokens: int, seed: int
) -> tuple[RequestRecord, RequestRecord]:
    """Send two requests that differ in their endings, one after the other."""
    prefix = text_of_tokens(tokenizer, prefix_tokens, seed)
    size = prefix_tokens + suffix_tokens
    prompts = [text_of_tokens(tokenizer, size, seed + turn, start=prefix) for turn in (1, 2)]
    requests = [completion(index, prompt, 8) for index, prompt in enumerate(prompts)]
    first, second = send_all(server, requests, 1)
    print(f"TTFT {first_text_ms(first):7.1f} then {first_text_ms(second):7.1f} ms,", end=" ")
    print(f"{second.cached_tokens} of {second.prompt_tokens} tokens cached", flush=True)
    return first, second


if __name__ == "__main__":
    sys.exit(main())
