"""Measure how embeddings at full rate and running streams slow each other down.

``python -m benchmarks.embeddings_beside_streams``: 8 chat streams decode alone, then while 32
clients ask for embeddings of texts of 5 to 250 tokens as fast as they are answered. The gaps
between the chunks that each stream gets are compared; the model that generates is the benchmarks'
own, or ``--model``, the embedder one of MiniLM's shape.
"""

from __future__ import annotations

import asyncio
import json
import random
import shlex
import statistics
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from benchmarks.checks import Check, conclude
from benchmarks.embedding_clients import figures_of, start_clients
from benchmarks.embeddings import LONGEST, SHORTEST
from benchmarks.make_embedder import EMBEDDER_FOLDER, make_embedder, texts_of_lengths
from benchmarks.measure import (
    BenchmarkError,
    completion,
    load_tokenizer,
    make_parser,
    prepare_model,
    text_of_tokens,
    warm_up,
    with_model,
)
from benchmarks.servers import SERVED_NAME, Server, server_of_models
from mlx_parallm.bench.client import LoadClient
from mlx_parallm.bench.http_stream import Target
from mlx_parallm.bench.record import RequestRecord
from mlx_parallm.bench.statistics import chunk_gaps_s, percentile

EMBEDDER_NAME = "embedder"
STREAM_PROMPT_TOKENS = 64
# LEAD_S: seconds in which costs are learned and streams prefilled, before the measurement.
LEAD_S = 3.0
#: ``Figures``: a round's figures by name.
Figures = dict[str, float]


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--embedder", type=Path, default=EMBEDDER_FOLDER, help="made if missing")
    parser.add_argument("--num-streams", type=int, default=8)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measurement")
    parser.add_argument("--num-texts", type=int, default=512)
    parser.add_argument("--stream-tokens", type=int, default=6000, help="more than are needed")
    args = parser.parse_args()
    model = prepare_model(args.model)
    models = {SERVED_NAME: model, EMBEDDER_NAME: make_embedder(args.embedder)}
    # The result cache is off, because cached results cost nothing.
    options = [*shlex.split(args.server_options), "--result-cache-bytes", "0"]
    with tempfile.TemporaryDirectory() as folder, server_of_models(models, options) as server:
        texts = write_texts(Path(folder), args.num_texts)
        warm_up(server, args.num_streams)
        figures_of(start_clients(server, EMBEDDER_NAME, texts, "--clients", args.clients))
        rounds = [measure_round(server, args, texts, seed) for seed in range(args.repetitions)]
    return conclude("embeddings_beside_streams", checks_of(rounds, args), {"rounds": rounds})


def write_texts(folder: Path, num_texts: int) -> Path:
    """Return a file with texts of mixed length."""
    draw = random.Random(1)
    lengths = [draw.randint(SHORTEST, LONGEST) for _ in range(num_texts)]
    path = folder / "texts.json"
    path.write_text(json.dumps(texts_of_lengths(lengths, 1)))
    return path


def measure_round(server: Server, args: Namespace, texts: Path, seed: int) -> Figures:
    """Return the figures of streams alone, embeddings alone, and both."""
    alone = asyncio.run(stream_gaps_ms(server, args, seed))
    options = ("--clients", args.clients, "--seconds")
    rate = figures_of(start_clients(server, EMBEDDER_NAME, texts, *options, args.seconds))
    both_s = args.seconds + 2 * LEAD_S
    clients = start_clients(server, EMBEDDER_NAME, texts, *options, both_s)
    beside = asyncio.run(stream_gaps_ms(server, args, seed))
    figures = {
        "gap_p50_alone_ms": percentile(alone, 50),
        "gap_p99_alone_ms": percentile(alone, 99),
        "gap_p50_beside_ms": percentile(beside, 50),
        "gap_p99_beside_ms": percentile(beside, 99),
        "gap_most_beside_ms": max(beside),
        "texts_per_s_alone": rate["texts_per_s"],
        "texts_per_s_beside": figures_of(clients)["texts_per_s"],
    }
    print({name: round(value, 1) for name, value in figures.items()}, flush=True)
    return figures


async def stream_gaps_ms(server: Server, args: Namespace, seed: int) -> list[float]:
    """Return the gaps between the streams' chunks, without those of the first seconds."""
    tokenizer = load_tokenizer(args.model)
    # A client disconnects when the time is over.
    client = LoadClient(Target.from_url(server.base_url), timeout_s=LEAD_S + args.seconds)
    planned = [
        completion(
            index,
            text_of_tokens(tokenizer, STREAM_PROMPT_TOKENS, 100 * seed + index),
            args.stream_tokens,
        )
        for index in range(args.num_streams)
    ]
    records = await asyncio.gather(
        *(client.send(with_model(stream, server.model)) for stream in planned)
    )
    gaps = [1000 * gap for record in records for gap in _counted_gaps_s(record)]
    if not gaps:
        raise BenchmarkError("no stream had two chunks")
    return gaps


def _counted_gaps_s(record: RequestRecord) -> list[float]:
    if not (record.error or "").startswith("TimeoutError"):
        raise BenchmarkError(f"a stream ended early: {record.error or 'raise --stream-tokens'}")
    return chunk_gaps_s([at for at in record.chunk_times_s if at > record.start_s + LEAD_S])


def checks_of(rounds: Sequence[Figures], args: Namespace) -> list[Check]:
    """Return medians over the rounds."""

    def median(name: str) -> float:
        return statistics.median(figures[name] for figures in rounds)

    ratio = statistics.median(
        figures["gap_p99_beside_ms"] / figures["gap_p99_alone_ms"] for figures in rounds
    )
    streams = f"{args.num_streams} streams"
    return [
        Check(f"{streams} alone: gap p50, ms", median("gap_p50_alone_ms")),
        Check(f"{streams} alone: gap p99, ms", median("gap_p99_alone_ms")),
        Check(f"{streams} beside embeddings: gap p50, ms", median("gap_p50_beside_ms")),
        Check(f"{streams} beside embeddings: gap p99, ms", median("gap_p99_beside_ms")),
        Check(f"{streams} beside embeddings: longest gap, ms", median("gap_most_beside_ms")),
        Check("gap p99 beside embeddings, relative to alone", ratio, "<=", 2.0),
        Check("embeddings alone: texts/s", median("texts_per_s_alone")),
        Check("embeddings beside streams: texts/s", median("texts_per_s_beside")),
    ]


if __name__ == "__main__":
    sys.exit(main())
