"""Measure how long a long prompt holds up running streams.

``python -m benchmarks.fairness``. While 8 streams decode, a prompt of 4,000 tokens arrives; the
longest gap in any stream until that prompt's first token is compared with the time of a prefill
chunk. A chunk's time is measured on the idle server: the difference between the times to first
token of prompts one chunk apart. The longest such difference counts, as chunks deep in a prompt
attend to more.
"""

from __future__ import annotations

import asyncio
import itertools
import shlex
import statistics
import sys
from argparse import Namespace
from collections.abc import Sequence

from tokenizers import Tokenizer

from benchmarks.checks import Check, conclude
from benchmarks.measure import (
    BenchmarkError,
    completion,
    first_text_ms,
    load_tokenizer,
    make_client,
    make_parser,
    prepare_model,
    send_all,
    text_of_tokens,
    warm_up,
    with_model,
)
from benchmarks.servers import Server, mlx_parallm_server
from mlx_parallm.bench.record import PlannedRequest, RequestRecord

STREAM_PROMPT_TOKENS = 64
# LEAD_S: seconds of decoding before the long prompt arrives.
LEAD_S = 1.0


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num-streams", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--stream-tokens", type=int, default=1500)
    parser.add_argument("--chunk-tokens", type=int, default=1024, help="the server's step budget")
    args = parser.parse_args()
    model = prepare_model(args.model)
    tokenizer = load_tokenizer(model)
    options = [*shlex.split(args.server_options), "--max-num-batched-tokens"]
    waits, first_texts, late = [], [], []
    with mlx_parallm_server(model, [*options, str(args.chunk_tokens)]) as server:
        warm_up(server, args.num_streams)
        for number in range(args.repetitions):
            seed = 1000 * (number + 1)
            first_texts.append(first_text_by_chunks_ms(server, tokenizer, args, seed))
            wait, first_text = longest_wait_ms(server, tokenizer, args, seed + 500)
            waits.append(wait)
            late.append(first_text)
            print(f"TTFT by chunks {[round(ms) for ms in first_texts[-1]]} ms,", end=" ")
            print(f"longest wait {wait:.0f} ms, TTFT among streams {first_text:.0f} ms", flush=True)
    chunk, wait = longest_chunk_ms(first_texts), statistics.median(waits)
    checks = [
        Check("longest prefill chunk, ms", chunk),
        Check("longest wait of a stream, ms", wait),
        Check("longest wait of a stream, in prefill chunks", wait / chunk, "<=", 2.0),
        Check("TTFT of the long prompt among streams, ms", statistics.median(late)),
    ]
    return conclude("fairness", checks, {"first_text_ms": first_texts, "wait_ms": waits})


def first_text_by_chunks_ms(
    server: Server, tokenizer: Tokenizer, args: Namespace, seed: int
) -> list[float]:
    """Return the times to first token of prompts of one chunk, two chunks and so on."""
    sizes = range(args.chunk_tokens, args.prompt_tokens + 1, args.chunk_tokens)
    prompts = [text_of_tokens(tokenizer, size, seed + number) for number, size in enumerate(sizes)]
    requests = [completion(index, prompt, 1) for index, prompt in enumerate(prompts)]
    return [first_text_ms(record) for record in send_all(server, requests, 1)]


def longest_chunk_ms(first_texts_ms: Sequence[Sequence[float]]) -> float:
    """Return the most that one more chunk adds to the median time to first token."""
    medians = [statistics.median(times) for times in zip(*first_texts_ms, strict=True)]
    return max(after - before for before, after in itertools.pairwise([0.0, *medians]))


def longest_wait_ms(
    server: Server, tokenizer: Tokenizer, args: Namespace, seed: int
) -> tuple[float, float]:
    """Return the longest gap in any stream between the long prompt's sending and first token.

    The second value is the time between the two.
    """
    streams = [
        completion(
            index,
            text_of_tokens(tokenizer, STREAM_PROMPT_TOKENS, seed + index),
            args.stream_tokens,
        )
        for index in range(1, args.num_streams + 1)
    ]
    late_prompt = text_of_tokens(tokenizer, args.prompt_tokens, seed)
    records, late = asyncio.run(_run(server, streams, completion(0, late_prompt, 4)))
    for record in (*records, late):
        if record.error is not None:
            raise BenchmarkError(f"a request failed: {record.error}\n{server.log_tail()}")
    begin_s, end_s = late.start_s, late.chunk_times_s[0]
    if min(record.end_s for record in records) < end_s:
        raise BenchmarkError("a stream ended before the long prompt did; raise --stream-tokens")
    gaps = [gap for record in records for gap in gaps_within(record.chunk_times_s, begin_s, end_s)]
    return 1000 * max(gaps), first_text_ms(late)


async def _run(
    server: Server, streams: Sequence[PlannedRequest], late: PlannedRequest
) -> tuple[list[RequestRecord], RequestRecord]:
    client = make_client(server)
    named = [with_model(planned, server.model) for planned in (*streams, late)]
    tasks = [asyncio.create_task(client.send(planned)) for planned in named[:-1]]
    await asyncio.sleep(LEAD_S)
    record = await client.send(named[-1])
    return [await task for task in tasks], record


def gaps_within(times_s: Sequence[float], begin_s: float, end_s: float) -> list[float]:
    """Return the gaps between neighbouring times that overlap ``begin_s`` to ``end_s``."""
    pairs = itertools.pairwise(times_s)
    return [after - before for before, after in pairs if after > begin_s and before < end_s]


if __name__ == "__main__":
    sys.exit(main())
