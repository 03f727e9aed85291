"""Measure whether the server's memory grows: 2,000 requests of mixed length.

``python -m benchmarks.memory`` compares the resident memory of the server process after all
requests with that after the first 200. The pool of KV blocks has a fixed size that the first 200
requests fill (the prefix cache keeps finished blocks until they are needed), and lengths are
bounded so that the first 200 hold prompts about as long as any later one; what grows then is a
leak, or a step larger than any before.
"""

from __future__ import annotations

import shlex
import sys

from benchmarks.checks import Check, conclude
from benchmarks.measure import chat_like_workload, make_parser, prepare_model, run_workload
from benchmarks.servers import mlx_parallm_server
from mlx_parallm.bench.workload import Lengths

MEBIBYTE = 1024 * 1024
PROMPT_LENGTHS = Lengths("uniform", 4, 1000)
OUTPUT_LENGTHS = Lengths("uniform", 4, 120)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num-requests", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=200, help="requests between readings")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--pool", default="128MiB", help="size of the pool of KV blocks")
    args = parser.parse_args()
    model = prepare_model(args.model)
    options = [*shlex.split(args.server_options), "--kv-cache-memory-bytes", args.pool]
    readings: list[float] = []
    with mlx_parallm_server(model, options) as server:
        for number in range(args.num_requests // args.batch):
            workload = chat_like_workload(
                args.batch,
                seed=number,
                prompt_lengths=PROMPT_LENGTHS,
                output_lengths=OUTPUT_LENGTHS,
                temperature=0.8 if number % 2 else 0.0,
            )
            run_workload(server, workload, args.concurrency)
            readings.append(server.resident_bytes() / MEBIBYTE)
            print(f"{args.batch * (number + 1):>6} requests  {readings[-1]:8.1f} MiB", flush=True)
    checks = [
        Check(f"MiB after {args.batch} requests", readings[0]),
        Check(f"MiB after {args.batch * len(readings)} requests", readings[-1]),
        Check("ratio", readings[-1] / readings[0], "<=", 1.05),
    ]
    return conclude("memory", checks, {"resident_mib": readings})


if __name__ == "__main__":
    sys.exit(main())
