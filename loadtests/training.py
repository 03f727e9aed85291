"""Training sessions at full rate beside traffic, and what each of them loses.

``python -m loadtests.training`` serves the embedded models. Eight streams decode alone and beside
a session, without and with 32 clients that act by a policy, 16 clients ask for embeddings alone
and beside it, and two sessions run at once. Phases
take turns, and each figure is a median over the rounds. The exit status is 0 if streams and
embeddings keep their share of the time, sessions share theirs, and a session goes on beside
streams.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx2

from benchmarks import raw_clients
from benchmarks.checks import Check, conclude
from benchmarks.embedding_clients import figures_of, start_clients
from benchmarks.measure import BenchmarkError, completion, with_model
from benchmarks.servers import Server, running_server
from mlx_parallm.bench.client import LoadClient
from mlx_parallm.bench.http_stream import Target
from mlx_parallm.bench.statistics import chunk_gaps_s, percentile

TIMEOUT_S = 120.0
STREAMED, TRAINED, EMBEDDER = "mlx-parallm-demo", "demo:mlm", "demo:embed"
POLICY = "demo:cartpole"
ACT = {"model": POLICY, "observations": [[0.1, 0.2, -0.3, 0.4]]}
NUM_STREAMS, NUM_CLIENTS, NUM_ACTORS = 8, 16, 32
# STREAM_TOKENS: of one answer; a stream asks again until its time is over.
STREAM_TOKENS = 400
# LEAD_S: seconds in which costs are learned, before each measurement.
LEAD_S = 1.5
SUBJECTS = ("the film", "this story", "the cast", "every scene of it", "the music of that film")
GOOD = ("is a joy", "shines", "is warm and clever", "held me until the end")
BAD = ("is dull", "drags on", "is cold and empty", "lost me after a minute")
ROWS = [
    {"text": f"{subject} {end}", "label": label}
    for subject in SUBJECTS
    for label, ends in (("good", GOOD), ("bad", BAD))
    for end in ends
]
SESSION = {
    "model": TRAINED,
    "trainable": {"layers": "top:1", "targets": ["query", "value"], "rank": 8},
    "objective": {
        "kind": "label_words",
        "template": "{text} It was [MASK].",
        "label_words": {"good": "cat", "bad": "dog"},
    },
    "data": ROWS,
    "batch_size": 16,
}
# NUM_VARIANTS: of each text that is embedded.
NUM_VARIANTS = 2500
MOST_GAPS, LEAST_EMBEDDINGS, MOST_APART = 2.0, 0.4, 1.1
# LEAST_STEPS: of a session beside streams, with acts relative to without.
LEAST_STEPS = 0.8
#: ``Figures``: a round's figures by name.
Figures = dict[str, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="of a phase")
    parser.add_argument("--server-options", default="", help="more flags for the server")
    args = parser.parse_args()
    # The rows of the sessions fit into their cache. Texts are hardly ever found in that of results,
    # because found ones cost nothing.
    target = ["mlx_parallm", "serve", "--model", STREAMED, TRAINED, EMBEDDER, POLICY]
    target += ["--result-cache-bytes", "2MiB", *shlex.split(args.server_options)]
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder) / "texts.json"
        words = [f"{row['text']} {number}" for number in range(NUM_VARIANTS) for row in ROWS]
        texts.write_text(json.dumps(words))
        options = ["--data-dir", f"{folder}/data"]
        with running_server("mlx_parallm", [*target, *options], None) as server:
            with training(server, 1):
                time.sleep(LEAD_S)
            act = Path(folder) / "act.json"
            act.write_text(json.dumps(ACT))
            rounds = [measure_round(server, texts, act, args.seconds) for _ in range(args.rounds)]
    return conclude("training", checks_of(rounds), {"rounds": rounds})


class Training:
    """Sessions that run; it reads how many steps they have made."""

    def __init__(self, client: httpx2.Client, paths: list[str]) -> None:
        self._client = client
        self._paths = paths
        self._before: list[int] = []
        self._begin_s = 0.0

    def begin(self) -> None:
        """Count from now on."""
        self._before, self._begin_s = self._counts(), time.perf_counter()

    def rates(self) -> list[float]:
        """Return the steps a second of each session since ``begin``."""
        counts, seconds = self._counts(), time.perf_counter() - self._begin_s
        return [
            (after - before) / seconds for before, after in zip(self._before, counts, strict=True)
        ]

    def _counts(self) -> list[int]:
        answers = [self._client.get(path).raise_for_status().json() for path in self._paths]
        failed = [each["reason"] for each in answers if each["status"] != "running"]
        if failed:
            raise BenchmarkError(f"a session does not run: {failed[0]}")
        return [each["step"] for each in answers]


@contextlib.contextmanager
def training(server: Server, count: int) -> Iterator[Training]:
    """Run sessions for as long as the context lasts."""
    with httpx2.Client(base_url=server.base_url, timeout=TIMEOUT_S) as client:
        paths: list[str] = []
        for seed in range(count):
            answer = client.post("/v1/mezo/sessions", json=SESSION | {"seed": seed})
            paths.append(f"/v1/mezo/sessions/{answer.raise_for_status().json()['id']}")
        for path in paths:
            client.post(f"{path}/run", json={"steps": 1_000_000}).raise_for_status()
        try:
            yield Training(client, paths)
        finally:
            for path in paths:
                client.delete(path)


def measure_round(server: Server, texts: Path, act: Path, seconds: float) -> Figures:
    """Return the figures of one phase of each kind."""
    figures: Figures = {"load_average": os.getloadavg()[0]}
    gaps_ms = stream_gaps_ms(server, seconds)
    figures |= {"gap_p50_alone_ms": percentile(gaps_ms, 50)}
    figures |= {"gap_p99_alone_ms": percentile(gaps_ms, 99)}
    figures["texts_per_s_alone"] = texts_per_s(server, texts, seconds)
    with training(server, 1) as session:
        time.sleep(LEAD_S)
        session.begin()
        time.sleep(seconds)
        figures["steps_per_s_alone"] = session.rates()[0]
        session.begin()
        gaps_ms = stream_gaps_ms(server, seconds)
        figures["steps_per_s_beside_streams"] = session.rates()[0]
        figures |= {"gap_p50_beside_ms": percentile(gaps_ms, 50)}
        figures |= {"gap_p99_beside_ms": percentile(gaps_ms, 99)}
        figures |= beside_acts(server, session, act, seconds)
        session.begin()
        figures["texts_per_s_beside"] = texts_per_s(server, texts, seconds)
        figures["steps_per_s_beside_embeddings"] = session.rates()[0]
    with training(server, 2) as sessions:
        time.sleep(LEAD_S)
        sessions.begin()
        time.sleep(seconds)
        first, second = sessions.rates()
        figures["steps_apart"] = max(first, second) / min(first, second)
    print({name: round(value, 2) for name, value in figures.items()}, flush=True)
    return figures


def beside_acts(server: Server, session: Training, act: Path, seconds: float) -> Figures:
    """Return the steps of a session beside streams and clients that act."""
    port = urlsplit(server.base_url).port
    assert port is not None, "servers here have one"
    options = ("--clients", NUM_ACTORS, "--seconds", seconds + LEAD_S)
    actors = raw_clients.start_clients(port, "/v1/rl/act", act, *options)
    session.begin()
    stream_gaps_ms(server, seconds)
    steps = session.rates()[0]
    return {
        "steps_per_s_beside_acts": steps,
        "acts_per_s": raw_clients.figures_of(actors)["requests_per_s"],
    }


def texts_per_s(server: Server, texts: Path, seconds: float) -> float:
    """Return the rate of embeddings at full load."""
    options = ("--clients", NUM_CLIENTS, "--seconds", seconds)
    return figures_of(start_clients(server, EMBEDDER, texts, *options))["texts_per_s"]


def stream_gaps_ms(server: Server, seconds: float) -> list[float]:
    """Return the gaps between the chunks of all streams, without those of the first seconds."""
    return asyncio.run(_stream_gaps_ms(server, seconds))


async def _stream_gaps_ms(server: Server, seconds: float) -> list[float]:
    begin_s = time.perf_counter()
    streams = [_gaps_s(server, index, begin_s, seconds) for index in range(NUM_STREAMS)]
    gaps = [1000 * gap for stream in await asyncio.gather(*streams) for gap in stream]
    if not gaps:
        raise BenchmarkError("no stream had two chunks")
    return gaps


async def _gaps_s(server: Server, index: int, begin_s: float, seconds: float) -> list[float]:
    """Return the gaps of answers that are asked for one after the other."""
    gaps: list[float] = []
    until_s = begin_s + LEAD_S + seconds
    while (left_s := until_s - time.perf_counter()) > 0:
        # A client disconnects when the time is over.
        client = LoadClient(Target.from_url(server.base_url), timeout_s=left_s)
        body = completion(index, f"{index},", STREAM_TOKENS, ignore_eos=True)
        record = await client.send(with_model(body, STREAMED))
        if record.error and not record.error.startswith("TimeoutError"):
            raise BenchmarkError(f"a stream failed: {record.error}")
        gaps += chunk_gaps_s([at for at in record.chunk_times_s if at > begin_s + LEAD_S])
    return gaps


def checks_of(rounds: list[Figures]) -> list[Check]:
    """Return medians over the rounds, and their targets."""

    def median(name: str) -> float:
        return statistics.median(figures[name] for figures in rounds)

    def ratio(name: str, over: str) -> float:
        return statistics.median(figures[name] / figures[over] for figures in rounds)

    gaps = ratio("gap_p99_beside_ms", "gap_p99_alone_ms")
    rate = ratio("texts_per_s_beside", "texts_per_s_alone")
    acts = ratio("steps_per_s_beside_acts", "steps_per_s_beside_streams")
    return [
        Check("8 streams alone: gap p50, ms", median("gap_p50_alone_ms")),
        Check("8 streams alone: gap p99, ms", median("gap_p99_alone_ms")),
        Check("8 streams beside a session: gap p50, ms", median("gap_p50_beside_ms")),
        Check("8 streams beside a session: gap p99, ms", median("gap_p99_beside_ms")),
        Check("gap p99 beside a session, relative to alone", gaps, "<=", MOST_GAPS),
        Check("embeddings alone: texts/s", median("texts_per_s_alone")),
        Check("embeddings beside a session: texts/s", median("texts_per_s_beside")),
        Check("embeddings beside a session, share of alone", rate, ">=", LEAST_EMBEDDINGS),
        Check("a session alone: steps/s", median("steps_per_s_alone")),
        Check("a session beside 8 streams: steps/s", median("steps_per_s_beside_streams"), ">=", 1),
        Check("a session beside 8 streams and acts: steps/s", median("steps_per_s_beside_acts")),
        Check("acts beside both: a second", median("acts_per_s")),
        Check("a session, with acts relative to without", acts, ">=", LEAST_STEPS),
        Check("a session beside embeddings: steps/s", median("steps_per_s_beside_embeddings")),
        Check("two sessions: steps of one over the other", median("steps_apart"), "<=", MOST_APART),
        Check("load average of the machine", median("load_average")),
    ]


if __name__ == "__main__":
    sys.exit(main())
