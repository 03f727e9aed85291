"""Measure embeddings of mixed length: 32 clients against a loop, and sentence-transformers.

``python -m benchmarks.embeddings`` makes an embedder of MiniLM's shape and texts of 5 to 250
tokens. 32 clients send each text once, one a request and then 16, after a round of each that does
not count; nothing is kept for equal inputs. Beside that: one client; the same model in a loop
without a server, one text at a time; and with ``--reference-python PYTHON``, a Python that has
sentence-transformers, its ``encode`` of all texts, of whose batch sizes the best counts. ``--gpu``
is for a server on an NVIDIA GPU: half precision.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checks import Check, conclude
from benchmarks.embedding_clients import figures_of, start_clients
from benchmarks.make_embedder import EMBEDDER_FOLDER, make_embedder, texts_of_lengths
from benchmarks.measure import make_parser
from benchmarks.servers import SERVED_NAME, Server, mlx_parallm_server, server_environment
from mlx_parallm.peers import child_process

SHORTEST, LONGEST = 5, 250
MANY_TEXTS = 16
REFERENCE = Path(__file__).with_name("embedding_reference.py")
COSINE = 0.9999
HALF_COSINE = 0.999


def main() -> int:
    parser = make_parser(__doc__)
    parser.set_defaults(model=EMBEDDER_FOLDER)
    parser.add_argument("--num-texts", type=int, default=512)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--reference-python", help="one that has sentence-transformers")
    parser.add_argument("--gpu", action="store_true", help="half precision on an NVIDIA GPU")
    args = parser.parse_args()
    make_embedder(args.model)
    with tempfile.TemporaryDirectory() as folder:
        rounds = [measure_round(args, Path(folder), seed) for seed in range(args.repetitions)]
    return conclude(
        "embeddings_gpu" if args.gpu else "embeddings",
        checks_of(rounds, args),
        {
            "rounds": rounds,
            "settings": {"clients": args.clients, "texts": args.num_texts},
        },
    )


def dtype_of(args: Namespace) -> str:
    """Return the dtype that the model computes in."""
    return "float16" if args.gpu else "float32"


def measure_round(args: Namespace, folder: Path, seed: int) -> dict[str, Any]:
    """Return the figures of every method, over the same texts."""
    draw = random.Random(seed)
    lengths = [draw.randint(SHORTEST, LONGEST) for _ in range(args.num_texts)]
    texts = folder / "texts.json"
    texts.write_text(json.dumps(texts_of_lengths(lengths, seed)))
    results: dict[str, Any] = {"tokens": sum(lengths)}
    options = [*shlex.split(args.server_options), "--result-cache-bytes", "0"]
    with mlx_parallm_server(args.model, [*options, "--dtype", dtype_of(args)]) as server:
        results |= served(server, texts, args, folder)
    results["loop"] = in_loop(args, texts)
    if args.reference_python:
        results["reference"] = by_reference(args, texts, folder)
    print({name: rate_of(result) for name, result in results.items()}, flush=True)
    return results


def served(server: Server, texts: Path, args: Namespace, folder: Path) -> dict[str, Any]:
    """Return the server's figures by the clients' mode."""

    def run(clients: int, num_texts: int, *more: object) -> dict[str, Any]:
        sizes = ("--clients", clients, "--texts-per-request", num_texts)
        return figures_of(start_clients(server, SERVED_NAME, texts, *sizes, *more))

    for num_texts in (MANY_TEXTS, 1):
        run(args.clients, num_texts)
    return {
        "clients": run(args.clients, 1, "--vectors", folder / "served.npy"),
        "clients_many": run(args.clients, MANY_TEXTS),
        "one_client": run(1, 1),
    }


def in_loop(args: Namespace, texts: Path) -> dict[str, Any]:
    """Return the figures of the loop in a process of its own."""
    target = ["benchmarks.embedding_loop", str(args.model), str(texts), dtype_of(args)]
    done = child_process.run(target, env=server_environment(), stdout=subprocess.PIPE)
    done.check_returncode()
    return json.loads(done.stdout)


def by_reference(args: Namespace, texts: Path, folder: Path) -> dict[str, Any]:
    """Return sentence-transformers' figures, and the similarity of its vectors."""
    device = "cuda" if args.gpu else "cpu"
    vectors = folder / "reference.npy"
    command = [args.reference_python, str(REFERENCE), str(args.model), str(texts), str(vectors)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    target = [child_process.COMMAND, *command, device]
    done = child_process.run(target, env=environment, stdout=subprocess.PIPE)
    done.check_returncode()
    figures = json.loads(done.stdout.splitlines()[-1])
    if "missing" in figures:
        print(f"no reference: {figures['missing']}", flush=True)
        return figures
    reference_vectors = np.load(vectors)
    served_vectors = np.load(folder / "served.npy")[: len(reference_vectors)]
    reference_vectors = reference_vectors / np.linalg.norm(reference_vectors, axis=1, keepdims=True)
    figures["cosine"] = float((reference_vectors * served_vectors).sum(axis=1).min())
    figures["by_batch_size"] = figures["texts_per_s"]
    figures["texts_per_s"] = max(figures["texts_per_s"].values())
    return figures


def rate_of(figures: Any) -> Any:
    """Return the texts per second in a run's figures; other values unchanged."""
    if not isinstance(figures, dict):
        return figures
    return round(figures.get("texts_per_s", float("nan")), 1)


def checks_of(rounds: list[dict[str, Any]], args: Namespace) -> list[Check]:
    """Return medians over the rounds; ratios are within a round."""

    def median(*names: str) -> float:
        return statistics.median(_value(figures, names) for figures in rounds)

    def ratio(name: str, other: str) -> float:
        return statistics.median(
            figures[name]["texts_per_s"] / figures[other]["texts_per_s"] for figures in rounds
        )

    many = f"{args.clients} clients"
    checks = [
        Check(f"{many}, 1 text per request: texts/s", median("clients", "texts_per_s")),
        Check(f"{many}, 1 text per request: tokens/s", median("clients", "tokens_per_s")),
        Check(f"{many}, 1 text per request: latency p99, ms", median("clients", "latency_p99_ms")),
        Check(
            f"{many}, {MANY_TEXTS} texts per request: texts/s",
            median("clients_many", "texts_per_s"),
        ),
        Check("1 client, 1 text per request: texts/s", median("one_client", "texts_per_s")),
        Check("loop without a server: texts/s", median("loop", "texts_per_s")),
        Check(f"{many} relative to the loop", ratio("clients", "loop"), ">=", 3.0),
        Check(f"{many} relative to 1 client", ratio("clients", "one_client")),
    ]
    if all("texts_per_s" in figures.get("reference", {}) for figures in rounds):
        cosine = HALF_COSINE if args.gpu else COSINE
        checks += [
            Check("sentence-transformers: texts/s", median("reference", "texts_per_s")),
            Check(
                f"{many} relative to sentence-transformers",
                ratio("clients", "reference"),
                ">=",
                1.0,
            ),
            Check(
                f"{many}, {MANY_TEXTS} texts per request, relative to sentence-transformers",
                ratio("clients_many", "reference"),
            ),
            Check(
                "smallest cosine similarity to its vectors",
                median("reference", "cosine"),
                ">=",
                cosine,
            ),
        ]
    return checks


def _value(figures: Any, names: tuple[str, ...]) -> float:
    for name in names:
        figures = figures[name]
    return float(figures)


if __name__ == "__main__":
    sys.exit(main())
