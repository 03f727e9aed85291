"""Measure the cost of acts by small nets: alone, by the form of their tensors, beside streams.

``python -m benchmarks.nets``: the policy of ``demo:cartpole`` (two layers of 64) and a CNN for
images of 84x84x4. ``--parts`` chooses among ``cost`` (beside ``/health``, in turns), ``images``,
``log`` (the access log's share) and ``beside`` (32 clients beside 8 streams, and embeddings).
Processor time is that of all threads of the server (Linux).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import statistics
import sys
import tempfile
import time
import urllib.request
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from safetensors.numpy import save

from benchmarks import embedding_clients, raw_clients
from benchmarks.checks import Check, conclude
from benchmarks.embeddings_beside_streams import LEAD_S, stream_gaps_ms, write_texts
from benchmarks.make_embedder import EMBEDDER_FOLDER, make_embedder
from benchmarks.make_net import CHANNELS, SIDE, make_cnn
from benchmarks.measure import make_parser, prepare_model, warm_up
from benchmarks.raw_clients import Clients, get, json_post, post
from benchmarks.servers import SERVED_NAME, Server, server_of_models
from mlx_parallm.bench.statistics import percentile

NET, CNN, EMBEDDER = "net", "cnn", "embedder"
ACT = "/v1/rl/act"
FILE_TYPE = "application/x-safetensors"
NO_LOG = "--disable-access-log"
MANY_CLIENTS = 64
ROWS, IMAGES = 64, 32
# BESIDE_S: seconds for which a client sends images beside others.
BESIDE_S = 6.0
OBSERVATION = [0.1, 0.2, -0.3, 0.4]
#: ``Figures``: a round's figures by name.
Figures = dict[str, float]


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=9, help="of cost, images and log")
    parser.add_argument("--requests", type=int, default=1024, help="of a turn with many clients")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each turn beside streams")
    parser.add_argument("--num-streams", type=int, default=8)
    parser.add_argument("--clients", type=int, default=32, help="beside streams")
    parser.add_argument("--stream-tokens", type=int, default=6000, help="more than are needed")
    parser.add_argument("--embedder", type=Path, default=EMBEDDER_FOLDER, help="made if missing")
    args = parser.parse_args()
    checks: list[Check] = []
    details: dict[str, list[Figures]] = {}
    for part in args.parts:
        measure, checks_of = PARTS[part]
        details[part] = measure(args)
        checks += checks_of(Medians(details[part]), args)
    return conclude("nets", checks, details)


class Medians:
    """Medians over rounds of figures and of their ratios."""

    def __init__(self, rounds: list[Figures]) -> None:
        self._rounds = rounds

    def of(self, name: str) -> float:
        """Return the median of a figure."""
        return statistics.median(figures[name] for figures in self._rounds)

    def ratio(self, name: str, other: str) -> float:
        """Return the median of a figure relative to another of the same round."""
        return statistics.median(figures[name] / figures[other] for figures in self._rounds)


def act_body(observations: object, model: str = NET) -> dict[str, object]:
    """Return a request for actions."""
    return {"model": model, "observations": observations}


def file_post(observations: np.ndarray, model: str) -> bytes:
    """Return a request for actions by a body of tensors."""
    content = save({"observations": observations}, metadata={"model": model})
    return post(ACT, content, FILE_TYPE)


def processor_s(server: Server) -> float:
    """Return the seconds that the threads of a server have run (Linux)."""
    total = 0
    for task in Path(f"/proc/{server.process.pid}/task").iterdir():
        # A thread may end meanwhile.
        with contextlib.suppress(OSError):
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def forward_counts(server: Server) -> tuple[float, float]:
    """Return the rows and the forwards of a server's nets so far."""
    with urllib.request.urlopen(f"{server.base_url}/metrics") as answer:
        lines = answer.read().decode().splitlines()

    def total(name: str) -> float:
        start = f"mlx_parallm:net_{name}{{"
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))

    return total("rows_total"), total("forward_rows_count")


def port_of(server: Server) -> int:
    """Return the port of a server."""
    port = urlsplit(server.base_url).port
    assert port is not None, "servers here have one"
    return port


@contextlib.contextmanager
def net_server(models: Mapping[str, Path], args: Namespace, *options: str) -> Iterator[Server]:
    """Run a server of nets, and of what else is named."""
    with server_of_models(models, [*options, *shlex.split(args.server_options)]) as server:
        yield server


def cartpole() -> Path:
    """Return what the policy of the pole is called as a model."""
    return Path("demo:cartpole")


def in_turns(turns: Mapping[str, Callable[[], Figures]], num_rounds: int) -> list[Figures]:
    """Return the figures of rounds in which all take turns, after a round that does not count."""
    rounds: list[Figures] = []
    for number in range(num_rounds + 1):
        figures: Figures = {}
        for name in list(turns)[:: -1 if number % 2 else 1]:
            figures |= {f"{name}: {what}": value for what, value in turns[name]().items()}
        rounds.append(figures)
    return rounds[1:]


def burst(server: Server, request: bytes, num_clients: int, count: int) -> Figures:
    """Return the processor time of a request, in µs, and the median of latencies, in ms."""
    with contextlib.closing(Clients(port_of(server), num_clients, request)) as clients:
        clients.answers(num_clients)
        before, begin_s = processor_s(server), time.perf_counter()
        latencies = clients.answers(count)
        used_s, took_s = processor_s(server) - before, time.perf_counter() - begin_s
    return {
        "us": 1e6 * used_s / count,
        "p50": 1e3 * percentile(latencies, 50),
        "per second": count / took_s,
    }


def counted_burst(server: Server, request: bytes, num_clients: int, count: int) -> Figures:
    """Return ``burst``, and the rows of a forward meanwhile."""
    rows, forwards = forward_counts(server)
    figures = burst(server, request, num_clients, count)
    more_rows, more_forwards = forward_counts(server)
    return figures | {"rows a forward": (more_rows - rows) / (more_forwards - forwards)}


def measure_cost(args: Namespace) -> list[Figures]:
    """Measure acts of one row and of many beside ``/health``."""
    observations = np.tile(np.array(OBSERVATION, np.float32), (ROWS, 1))
    act = json_post(ACT, act_body([OBSERVATION]))
    many, few = args.requests, max(args.requests // 4, 1)
    with net_server({NET: cartpole()}, args, NO_LOG) as server:
        turns = {
            "health": lambda: burst(server, get("/health"), MANY_CLIENTS, many),
            "act": lambda: counted_burst(server, act, MANY_CLIENTS, many),
            "one health": lambda: burst(server, get("/health"), 1, few),
            "one act": lambda: burst(server, act, 1, few),
            "rows, JSON": lambda: burst(
                server, json_post(ACT, act_body(observations.tolist())), 1, few
            ),
            "rows, file": lambda: burst(server, file_post(observations, NET), 1, few),
        }
        return in_turns(turns, args.rounds)


def checks_of_cost(medians: Medians, args: Namespace) -> list[Check]:
    """Return the figures beside their targets."""
    del args
    many, ratio = f"{MANY_CLIENTS} clients", medians.ratio("act: us", "health: us")
    per_row = {form: medians.of(f"rows, {form}: us") / ROWS for form in ("JSON", "file")}
    return [
        Check(f"{many}: /health, us of processor time", medians.of("health: us")),
        Check(f"{many}: act of a row, us of processor time", medians.of("act: us")),
        Check(f"{many}: act relative to /health", ratio, "<=", 1.5),
        Check(f"{many}: acts a second", medians.of("act: per second")),
        Check(f"{many}: rows a forward", medians.of("act: rows a forward"), ">=", 8),
        Check("one client: /health p50, ms", medians.of("one health: p50")),
        Check("one client: act p50, ms", medians.of("one act: p50"), "<=", 2.5),
        Check(
            "one client: act p50 relative to /health",
            medians.ratio("one act: p50", "one health: p50"),
            "<=",
            4.0,
        ),
        Check(f"{ROWS} rows, JSON: us of processor time a row", per_row["JSON"]),
        Check(f"{ROWS} rows, safetensors: us of processor time a row", per_row["file"], "<=", 20),
    ]


def measure_images(args: Namespace) -> list[Figures]:
    """Measure images by JSON and by safetensors."""
    shape = (IMAGES, CHANNELS, SIDE, SIDE)
    images = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    by_json = json_post(ACT, act_body(images.tolist(), CNN))
    count = max(args.requests // 128, 2)
    with net_server({CNN: make_cnn()}, args, NO_LOG) as server:
        turns = {
            "JSON": lambda: burst(server, by_json, 1, count),
            "file": lambda: burst(server, file_post(images, CNN), 1, count),
            "beside JSON": lambda: health_beside(server, act_body(images.tolist(), CNN)),
        }
        return in_turns(turns, args.rounds)


def health_beside(server: Server, body: dict[str, object]) -> Figures:
    """Return percentiles of ``/health``, in ms, while another client sends a body."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "act.json"
        file.write_text(json.dumps(body))
        sends = raw_clients.start_clients(
            port_of(server), ACT, file, "--clients", 1, "--seconds", BESIDE_S
        )
        with contextlib.closing(Clients(port_of(server), 1, get("/health"))) as clients:
            latencies = clients.answers_within(BESIDE_S)
        raw_clients.figures_of(sends)
    return {"p99": 1e3 * percentile(latencies, 99), "max": 1e3 * max(latencies)}


def checks_of_images(medians: Medians, args: Namespace) -> list[Check]:
    """Return the figures beside their targets."""
    del args
    what = f"{IMAGES} images of {SIDE}x{SIDE}x{CHANNELS}"
    return [
        Check(f"{what}, JSON: p50, ms", medians.of("JSON: p50")),
        Check(f"{what}, safetensors: p50, ms", medians.of("file: p50")),
        Check(f"{what}: speed-up of safetensors", medians.ratio("JSON: p50", "file: p50"), ">=", 3),
        Check(f"{what}, JSON: /health p99 beside, ms", medians.of("beside JSON: p99")),
        Check(f"{what}, JSON: /health max beside, ms", medians.of("beside JSON: max")),
    ]


def measure_log(args: Namespace) -> list[Figures]:
    """Measure acts with and without an access log."""
    act = json_post(ACT, act_body([OBSERVATION]))
    models = {NET: cartpole()}
    with net_server(models, args, NO_LOG) as quiet, net_server(models, args) as logged:
        turns = {
            "quiet": lambda: burst(quiet, act, MANY_CLIENTS, args.requests),
            "logged": lambda: burst(logged, act, MANY_CLIENTS, args.requests),
        }
        return in_turns(turns, args.rounds)


def checks_of_log(medians: Medians, args: Namespace) -> list[Check]:
    """Return the share of the log."""
    del args
    share = medians.ratio("logged: us", "quiet: us")
    return [
        Check("act with the access log, us of processor time", medians.of("logged: us")),
        Check("act with the access log, relative to one without", share),
    ]


def measure_beside(args: Namespace) -> list[Figures]:
    """Measure streams, acts and embeddings alone and beside each other."""
    models = {
        SERVED_NAME: prepare_model(args.model),
        NET: cartpole(),
        EMBEDDER: make_embedder(args.embedder),
    }
    options = (NO_LOG, "--result-cache-bytes", "0")
    with (
        tempfile.TemporaryDirectory() as folder,
        net_server(models, args, *options) as server,
    ):
        body, texts = Path(folder) / "act.json", write_texts(Path(folder), 512)
        body.write_text(json.dumps(act_body([OBSERVATION])))
        warm_up(server, args.num_streams)
        clients = ("--clients", args.clients)
        embedding_clients.figures_of(
            embedding_clients.start_clients(server, EMBEDDER, texts, *clients)
        )
        raw_clients.figures_of(
            raw_clients.start_clients(port_of(server), ACT, body, *clients, "--seconds", 2)
        )
        return [beside_round(server, args, body, texts, seed) for seed in range(args.repetitions)]


def beside_round(server: Server, args: Namespace, body: Path, texts: Path, seed: int) -> Figures:
    """Return the figures of a round of turns, each with streams."""
    figures: Figures = {}
    clients = ("--clients", args.clients, "--seconds", args.seconds + 2 * LEAD_S)
    for name, has_acts, has_texts in (
        ("alone", False, False),
        ("acts", True, False),
        ("texts", False, True),
        ("both", True, True),
    ):
        acts = has_acts and raw_clients.start_clients(port_of(server), ACT, body, *clients)
        embeds = has_texts and embedding_clients.start_clients(server, EMBEDDER, texts, *clients)
        gaps = asyncio.run(stream_gaps_ms(server, args, seed))
        figures[f"{name}: gap p50"] = percentile(gaps, 50)
        figures[f"{name}: gap p99"] = percentile(gaps, 99)
        if acts:
            of_acts = raw_clients.figures_of(acts)
            figures[f"{name}: act p50"] = of_acts["p50_ms"]
            figures[f"{name}: act p99"] = of_acts["p99_ms"]
            figures[f"{name}: acts"] = of_acts["requests_per_s"]
        if embeds:
            rate = embedding_clients.figures_of(embeds)["texts_per_s"]
            figures[f"{name}: texts"] = rate
    print({name: round(value, 2) for name, value in figures.items()}, flush=True)
    return figures


def checks_of_beside(medians: Medians, args: Namespace) -> list[Check]:
    """Return the figures beside their targets."""
    streams, step = f"{args.num_streams} streams", medians.of("acts: gap p50")
    return [
        Check(f"{streams} alone: gap p50, ms", medians.of("alone: gap p50")),
        Check(f"{streams} alone: gap p99, ms", medians.of("alone: gap p99")),
        Check(f"{streams} beside acts: gap p50, ms", step),
        Check(f"{streams} beside acts: gap p99, ms", medians.of("acts: gap p99")),
        Check(
            "gap p99 beside acts, relative to alone",
            medians.ratio("acts: gap p99", "alone: gap p99"),
            "<=",
            1.3,
        ),
        Check("acts beside streams: a second", medians.of("acts: acts")),
        Check("acts beside streams: p50, ms", medians.of("acts: act p50")),
        Check("acts beside streams: p99, ms", medians.of("acts: act p99"), "<=", 2 * step + 5),
        Check("acts beside streams and embeddings: p99, ms", medians.of("both: act p99")),
        Check("embeddings beside streams: texts/s", medians.of("texts: texts")),
        Check(
            "embeddings beside streams, with acts relative to without",
            medians.ratio("both: texts", "texts: texts"),
            ">=",
            0.8,
        ),
    ]


#: ``PARTS``: what is measured, and its table.
PARTS: dict[
    str,
    tuple[Callable[[Namespace], list[Figures]], Callable[[Medians, Namespace], list[Check]]],
] = {
    "cost": (measure_cost, checks_of_cost),
    "images": (measure_images, checks_of_images),
    "log": (measure_log, checks_of_log),
    "beside": (measure_beside, checks_of_beside),
}


if __name__ == "__main__":
    sys.exit(main())
