"""Measure masks filled in texts of mixed length, against transformers' fill-mask pipeline.

``python -m benchmarks.fill_mask --reference-python PYTHON`` makes a masked LM of RoBERTa-base's
shape and texts of 8 to 128 tokens with a mask each. Clients of Hugging Face's InferenceClient send
each text once; then the pipeline gets the same texts, one at a time and in batches, of which the
faster counts. PYTHON is one that has transformers and torch, such as of
``python3 -m venv V && V/bin/pip install torch transformers``.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from huggingface_hub import InferenceClient

from benchmarks.checks import Check, conclude
from benchmarks.make_masked_lm import MASKED_LM_FOLDER, make_masked_lm, masked_texts
from benchmarks.measure import BenchmarkError, make_parser
from benchmarks.servers import Server, mlx_parallm_server

SHORTEST, LONGEST = 8, 128
REFERENCE = Path(__file__).with_name("fill_mask_reference.py")
WARM_UP_SEED = 1_000_003


def main() -> int:
    parser = make_parser(__doc__)
    parser.set_defaults(model=MASKED_LM_FOLDER)
    parser.add_argument("--num-texts", type=int, default=64)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--reference-python", required=True, help="has transformers and torch")
    args = parser.parse_args()
    make_masked_lm(args.model)
    options = [*shlex.split(args.server_options), "--result-cache-bytes", "0"]
    with mlx_parallm_server(args.model, options) as server, reference(args) as pipeline:
        fill(server, texts_of(WARM_UP_SEED, args), args.clients)
        rounds = [
            measure_round(server, pipeline, texts_of(seed, args), args)
            for seed in range(args.repetitions)
        ]
        about = pipeline.about
    details = {"rounds": rounds, "reference": about, "texts": args.num_texts}
    return conclude("fill_mask", checks_of(rounds, args.clients), details)


def texts_of(seed: int, args: Namespace) -> list[str]:
    """Return the texts of a round; rounds share none."""
    draw = random.Random(seed)
    return masked_texts([draw.randint(SHORTEST, LONGEST) for _ in range(args.num_texts)], seed)


class Pipeline:
    """The process of the reference.

    Raises:
        BenchmarkError: it has not what it needs.
    """

    def __init__(self, requests: IO[str], answers: IO[str]) -> None:
        self._requests = requests
        self._answers = answers
        self.about = self._read()

    def run(self, texts: list[str]) -> dict[str, Any]:
        """Return the pipeline's figures over these texts."""
        self._requests.write(json.dumps(texts) + "\n")
        self._requests.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise BenchmarkError(
                "The reference ended: its Python must have transformers and torch."
            )
        return json.loads(line)


@contextlib.contextmanager
def reference(args: Namespace) -> Iterator[Pipeline]:
    """Yield transformers' pipeline, loaded with the same model in a process of its own."""
    process = subprocess.Popen(
        [args.reference_python, str(REFERENCE), str(args.model)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield Pipeline(process.stdin, process.stdout)
    finally:
        process.stdin.close()
        process.kill()
        process.wait()


def measure_round(
    server: Server, pipeline: Pipeline, texts: list[str], args: Namespace
) -> dict[str, Any]:
    """Return the figures of the server and of the pipeline, measured in turn."""
    served = fill(server, texts, args.clients)
    result = pipeline.run(texts)
    ours, theirs = served.pop("best"), result.pop("best")
    pairs = list(zip(ours, theirs, strict=True))
    result["difference"] = max(abs(mine[1] / other[1] - 1) for mine, other in pairs)
    result["same"] = sum(mine[0] == other[0] for mine, other in pairs) / len(texts)
    figures = {"served": served, "reference": result, "load_average": os.getloadavg()}
    print(figures, flush=True)
    return figures


def fill(server: Server, texts: list[str], num_clients: int) -> dict[str, Any]:
    """Return texts per second, the median latency in ms, and the likeliest token of each text."""
    client = InferenceClient(model=server.base_url)

    def ask(text: str) -> tuple[float, list[Any]]:
        begin_s = time.perf_counter()
        best = client.fill_mask(text)[0]
        return 1000 * (time.perf_counter() - begin_s), [best.token, best.score]

    begin_s = time.perf_counter()
    with ThreadPoolExecutor(num_clients) as pool:
        answers = list(pool.map(ask, texts))
    rate = len(texts) / (time.perf_counter() - begin_s)
    return {
        "texts_per_s": rate,
        "latency_ms": statistics.median(latency_ms for latency_ms, _ in answers),
        "best": [best for _, best in answers],
    }


def checks_of(rounds: list[dict[str, Any]], num_clients: int) -> list[Check]:
    """Return medians over the rounds; ratios are within a round."""
    served = [figures["served"]["texts_per_s"] for figures in rounds]
    best = [max(figures["reference"]["texts_per_s"].values()) for figures in rounds]
    ratios = [ours / theirs for ours, theirs in zip(served, best, strict=True)]
    checks = [
        Check(f"{num_clients} clients: texts/s", statistics.median(served)),
        Check(
            f"{num_clients} clients: median latency, ms",
            statistics.median(figures["served"]["latency_ms"] for figures in rounds),
        ),
    ]
    for size in rounds[0]["reference"]["texts_per_s"]:
        rates = [figures["reference"]["texts_per_s"][size] for figures in rounds]
        checks.append(Check(f"pipeline, batches of {size}: texts/s", statistics.median(rates)))
    return [
        *checks,
        Check("ratio to the faster of these", statistics.median(ratios), ">=", 0.8),
        Check(
            "largest relative difference of a likeliest token's score",
            max(figures["reference"]["difference"] for figures in rounds),
            "<=",
            1e-3,
        ),
        Check("same likeliest token", min(figures["reference"]["same"] for figures in rounds)),
    ]


if __name__ == "__main__":
    sys.exit(main())
