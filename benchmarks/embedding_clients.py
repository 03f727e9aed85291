"""Clients of ``/v1/embeddings``, in a process of their own so that they disturb no other clock.

``python -m benchmarks.embedding_clients URL MODEL TEXTS.json`` sends every text once, or all of
them over and over with ``--seconds``, and prints its figures as JSON.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import itertools
import json
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks.measure import BenchmarkError
from benchmarks.servers import Server
from mlx_parallm.bench.statistics import percentile
from mlx_parallm.peers.child_process import ChildProcess

TIMEOUT_S = 300.0


@dataclass(slots=True)
class Load:
    """The state that the clients share."""

    url: str
    model: str
    texts: list[str]
    parts: Iterator[tuple[int, ...]]
    end_s: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    latencies_s: list[float] = field(default_factory=list)
    vectors: dict[int, np.ndarray] = field(default_factory=dict)
    num_texts: int = 0
    num_tokens: int = 0
    errors: list[str] = field(default_factory=list)

    def next_part(self) -> tuple[int, ...] | None:
        """Return the indices of the next request's texts; None after the last request."""
        with self.lock:
            return next(self.parts, None) if time.perf_counter() < self.end_s else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("texts", type=Path)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--texts-per-request", type=int, default=1)
    parser.add_argument("--seconds", type=float, help="go on for so long")
    parser.add_argument("--vectors", type=Path, help="a .npy file to write them to")
    args = parser.parse_args()
    texts = json.loads(args.texts.read_text())
    size = args.texts_per_request
    places = [
        tuple(range(first, min(first + size, len(texts)))) for first in range(0, len(texts), size)
    ]
    begin_s = time.perf_counter()
    endless = args.seconds is not None
    load = Load(
        url=args.url,
        model=args.model,
        texts=texts,
        parts=itertools.cycle(places) if endless else iter(places),
        end_s=begin_s + args.seconds if endless else float("inf"),
    )
    threads = [threading.Thread(target=send_all, args=(load,)) for _ in range(args.clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin_s
    if args.vectors and not load.errors:
        np.save(args.vectors, np.stack([load.vectors[place] for place in range(len(texts))]))
    print(json.dumps(figures(load, seconds)))


def figures(load: Load, seconds: float) -> dict[str, Any]:
    """Return the figures of all requests."""
    return {
        "seconds": seconds,
        "texts_per_s": load.num_texts / seconds,
        "tokens_per_s": load.num_tokens / seconds,
        "latency_p50_ms": 1000 * percentile(load.latencies_s, 50),
        "latency_p99_ms": 1000 * percentile(load.latencies_s, 99),
        "errors": load.errors[:3],
    }


def send_all(load: Load) -> None:
    """Send one request after the other on one connection."""
    connection = http.client.HTTPConnection(urlsplit(load.url).netloc, timeout=TIMEOUT_S)
    while (part := load.next_part()) is not None:
        begin_s = time.perf_counter()
        try:
            answer = ask(connection, load, part)
        except (OSError, http.client.HTTPException, ValueError) as problem:
            load.errors.append(f"{type(problem).__name__}: {problem}")
            return
        with load.lock:
            load.latencies_s.append(time.perf_counter() - begin_s)
            load.num_texts += len(part)
            load.num_tokens += answer["usage"]["prompt_tokens"]
            for place, item in zip(part, answer["data"], strict=True):
                load.vectors[place] = np.frombuffer(base64.b64decode(item["embedding"]), "<f4")


def ask(connection: http.client.HTTPConnection, load: Load, part: Sequence[int]) -> dict[str, Any]:
    """Send a request and return its JSON; raise ValueError unless the status is 200."""
    body = {
        "model": load.model,
        "input": [load.texts[place] for place in part],
        "encoding_format": "base64",
    }
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/embeddings", json.dumps(body), headers)
    answer = connection.getresponse()
    content = answer.read()
    if answer.status != 200:
        raise ValueError(f"{answer.status}: {content[:200]!r}")
    return json.loads(content)


def start_clients(server: Server, model: str, texts: Path, *options: object) -> ChildProcess:
    """Start this module in a process of its own."""
    target = ["benchmarks.embedding_clients", server.base_url, model, str(texts)]
    return ChildProcess([*target, *map(str, options)], stdout=subprocess.PIPE)


def figures_of(process: ChildProcess) -> dict[str, Any]:
    """Wait for a client process and return its figures.

    Raises:
        BenchmarkError: a request failed.
    """
    output, _ = process.communicate()
    result = json.loads(output) if output else {"errors": ["no output"]}
    if result["errors"]:
        raise BenchmarkError(f"requests for embeddings failed: {result['errors']}")
    return result


if __name__ == "__main__":
    main()
