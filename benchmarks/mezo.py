"""Measure steps of training sessions against naive ones, which compute each sign apart.

``python -m benchmarks.mezo`` makes a masked LM of 12 narrow layers and random sentences of the
lengths of SST-2's. Sessions on one server have the same batches, and make a step in turn: naive,
all layers in one forward, the top third from kept states, and the same with batches of neighbours
in length. The first epoch of the last two computes what later ones find. With
``--reference-python PYTHON``, one that has transformers and torch, its two forwards of the same
batch without gradients are timed too. ``--batch-sizes 4,16,64`` measures the scaling instead.
``--shape large`` has the shape of RoBERTa-large in bfloat16, for a GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import statistics
import subprocess
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.checks import RESULTS, Check, conclude
from benchmarks.curve_plot import Line, Panel, plot_panels
from benchmarks.make_masked_lm import CONFIG, SPECIALS, make_masked_lm
from benchmarks.measure import make_parser
from benchmarks.servers import SERVED_NAME, Server, mlx_parallm_server
from mlx_parallm.training.batches import Batches, BatchOrder

REFERENCE = Path(__file__).with_name("mezo_reference.py")
BEGIN, END = SPECIALS.index("<s>"), SPECIALS.index("</s>")
MASK = CONFIG["vocab_size"] - 1
# WORDS: ids of ordinary tokens; the first two are the label words.
WORDS = (1000, 20_000)
SHORTEST, LONGEST = 7, 66
# MEAN_LOG, SPREAD: of the logarithm of a length; the median is 23 tokens.
MEAN_LOG, SPREAD = 3.1, 0.55
SEED = 3
NAIVE, ALL, TOP, LIKE = "naive", "all layers", "top third", "top third, by length"


@dataclass(frozen=True, slots=True)
class Shape:
    """A masked LM, and what is measured with it.

    Attributes:
        changes: of the config of RoBERTa-base.
        options: of the server.
        top: the layers of the top third.
        batch_size: examples of a step.
        suffix: of the names of the results.
        least: the ratios to naive steps that are asked for.
    """

    changes: Mapping[str, int]
    options: Sequence[str]
    top: int
    batch_size: int
    suffix: str
    least: Mapping[str, float]


FIRST, KEPT, KEPT_LIKE = f"{TOP}, first visit", f"{TOP}, kept", f"{LIKE}, kept"
SHAPES = {
    "narrow": Shape(
        {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512},
        (),
        top=4,
        batch_size=16,
        suffix="",
        least={ALL: 1.25, FIRST: 1.8, KEPT: 4.0},
    ),
    "large": Shape(
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
        ("--dtype", "bfloat16"),
        top=8,
        batch_size=64,
        suffix="_gpu",
        least={KEPT: 3.0},
    ),
}


def main() -> int:
    parser = make_parser(__doc__)
    parser.set_defaults(model=None)
    parser.add_argument("--shape", choices=SHAPES, default="narrow")
    parser.add_argument("--examples", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-sizes", help="measure steps of each of these sizes instead")
    parser.add_argument("--threads", type=int, default=1, help="of the products of both")
    parser.add_argument("--reference-python", help="has transformers and torch")
    args = parser.parse_args()
    # MLX computes everything but products in one thread.
    os.environ["OPENBLAS_NUM_THREADS"] = str(args.threads)
    shape = SHAPES[args.shape]
    args.model = args.model or Path(f"results/masked_lm_{args.shape}")
    make_masked_lm(args.model, **shape.changes)
    rows = sentences(args.examples)
    with tempfile.TemporaryDirectory() as data:
        options = ["--data-dir", data, *shape.options, *shlex.split(args.server_options)]
        with mlx_parallm_server(args.model, options) as server:
            if args.batch_sizes:
                sizes = [int(size) for size in args.batch_sizes.split(",")]
                checks = scaling(server, rows, shape, sizes)
                status = conclude(f"mezo_scaling{shape.suffix}", checks, {"examples": len(rows)})
                (RESULTS / "mezo_scaling.svg").write_text(scaling_plot(RESULTS))
                return status
            with reference(args) as times:
                steps, theirs = measure(server, rows, shape, args.epochs, times)
    details = {"steps": steps, "reference": theirs}
    return conclude(f"mezo{shape.suffix}", checks_of(steps, theirs, shape), details)


def sentences(count: int) -> list[dict[str, Any]]:
    """Return rows of random words with lengths like SST-2's."""
    draw = random.Random(SEED)
    rows: list[dict[str, Any]] = []
    for _ in range(count):
        length = min(max(round(draw.lognormvariate(MEAN_LOG, SPREAD)), SHORTEST), LONGEST)
        words = [draw.randrange(*WORDS) for _ in range(length - 3)]
        rows.append({"token_ids": [BEGIN, *words, MASK, END], "label": draw.choice("ab")})
    return rows


def body_of(
    rows: Sequence[Any], shape: Shape, batch_size: int | None = None, **changes: Any
) -> dict[str, Any]:
    """Return the body of a new session."""
    return {
        "model": SERVED_NAME,
        "trainable": {"targets": ["query", "value"], "layers": f"top:{shape.top}", "rank": 8},
        "objective": {"kind": "label_words", "label_words": {"a": WORDS[0], "b": WORDS[0] + 1}},
        "data": list(rows),
        "batch_size": batch_size or shape.batch_size,
        "seed": SEED,
        **changes,
    }


@contextlib.contextmanager
def opened(client: httpx2.Client, body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the path of a session, which is deleted in the end."""
    answer = client.post("/v1/mezo/sessions", json=body).raise_for_status().json()
    path = f"/v1/mezo/sessions/{answer['id']}"
    try:
        yield path
    finally:
        client.delete(path)


def step(client: httpx2.Client, path: str) -> dict[str, Any]:
    """Make a step and return its record."""
    begin_s = time.perf_counter()
    (record,) = client.post(f"{path}/step", json={}).raise_for_status().json()["data"]
    return record | {"seconds": time.perf_counter() - begin_s}


def measure(
    server: Server, rows: Sequence[Any], shape: Shape, epochs: int, times: Any
) -> tuple[dict[str, list[dict[str, Any]]], list[float]]:
    """Return the records of each session's steps, and the reference's seconds."""
    everything = {"targets": ["query", "value"], "layers": "all", "rank": 8}
    kinds: dict[str, dict[str, Any]] = {
        NAIVE: {"trainable": everything, "mode": "naive"},
        ALL: {"trainable": everything},
        TOP: {},
        LIKE: {"batches": "by_length"},
    }
    lengths = [len(row["token_ids"]) for row in rows]
    batches = Batches(lengths, shape.batch_size, BatchOrder.RANDOM, SEED)
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in kinds}
    theirs: list[float] = []
    with (
        httpx2.Client(base_url=server.base_url, timeout=600) as client,
        contextlib.ExitStack() as stack,
    ):
        paths = {
            name: stack.enter_context(opened(client, body_of(rows, shape, **changes)))
            for name, changes in kinds.items()
        }
        for number in range(epochs * (len(rows) // shape.batch_size)):
            for name, path in paths.items():
                steps[name].append(step(client, path))
            if times is not None:
                theirs.append(times([rows[row]["token_ids"] for row in batches.of_step(number)]))
    return steps, theirs


@contextlib.contextmanager
def reference(args: Namespace) -> Iterator[Any]:
    """Yield what times transformers' forwards of a batch, in a process of its own; or None."""
    if args.reference_python is None:
        yield None
        return
    process = subprocess.Popen(
        [args.reference_python, str(REFERENCE), str(args.model), str(args.threads)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    requests, answers = process.stdin, process.stdout

    def seconds(batch: Sequence[Sequence[int]]) -> float:
        requests.write(json.dumps(batch) + "\n")
        requests.flush()
        return float(answers.readline())

    try:
        yield seconds
    finally:
        requests.close()
        process.kill()
        process.wait()


def checks_of(
    steps: Mapping[str, list[dict[str, Any]]], theirs: Sequence[float], shape: Shape
) -> list[Check]:
    """Return the figures and their targets."""
    naive = [record["seconds"] for record in steps[NAIVE]]
    checks = [Check("naive: steps/s", 1 / statistics.median(naive))]
    if theirs:
        checks.append(Check("naive over transformers", ratio(theirs, naive), ">=", 0.9))
    ratios = {
        ALL: over(steps, ALL),
        FIRST: over(steps, TOP, hit=False),
        KEPT: over(steps, TOP, hit=True),
        KEPT_LIKE: over(steps, LIKE, hit=True),
    }
    checks += [
        Check(f"{name}, over naive", value, ">=", shape.least.get(name))
        for name, value in ratios.items()
    ]
    lookups, hits = (sum(record[name] for record in steps[TOP]) for name in ("lookups", "hits"))
    checks.append(Check("share of hits", hits / lookups))
    tokens, naive_tokens = (
        sum(record[name] for record in steps[TOP])
        for name in ("layer_tokens", "naive_layer_tokens")
    )
    checks.append(Check("layer-tokens over naive", tokens / naive_tokens))
    gaps = [
        abs(record[sign] - other[sign])
        for record, other in zip(steps[NAIVE], steps[ALL], strict=True)
        for sign in ("loss_plus", "loss_minus")
    ]
    limit = None if shape.options else 1e-5
    checks.append(Check("largest difference of a loss to naive", max(gaps), "<=", limit))
    return checks


def over(steps: Mapping[str, list[dict[str, Any]]], name: str, *, hit: bool | None = None) -> float:
    """Return how many times as fast steps are as the naive ones of the same numbers."""
    pairs = [
        (naive["seconds"], record["seconds"])
        for naive, record in zip(steps[NAIVE], steps[name], strict=True)
        if hit is None or (record["hits"] == record["lookups"]) is hit
    ]
    return ratio([naive for naive, _ in pairs], [own for _, own in pairs])


def ratio(slower: Sequence[float], faster: Sequence[float]) -> float:
    """Return the ratio of medians."""
    return statistics.median(slower) / statistics.median(faster)


def scaling(server: Server, rows: Sequence[Any], shape: Shape, sizes: Sequence[int]) -> list[Check]:
    """Return steps and examples a second by the size of a batch, all from kept states."""
    checks: list[Check] = []
    with httpx2.Client(base_url=server.base_url, timeout=600) as client:
        for size in sizes:
            with opened(client, body_of(rows, shape, size)) as path:
                count = max(8, 2 * len(rows) // size)
                seconds = [step(client, path)["seconds"] for _ in range(count)][count // 2 :]
            rate = 1 / statistics.median(seconds)
            checks.append(Check(f"batches of {size}: steps/s", rate))
            checks.append(Check(f"batches of {size}: examples/s", rate * size))
            memory = server.resident_bytes() / 2**20
            checks.append(Check(f"batches of {size}: memory, MiB", memory))
    return checks


def scaling_plot(folder: Path) -> str:
    """Return a plot of what ``scaling`` has written for either shape."""
    panels = {"examples/s": "{:,.0f}", "steps/s": "{:.0f}"}
    lines: dict[str, dict[str, list[Line]]] = {rate: {} for rate in panels}
    for shape in SHAPES.values():
        path = folder / f"mezo_scaling{shape.suffix}.json"
        checks = json.loads(path.read_text())["checks"] if path.exists() else []
        for rate, own in lines.items():
            points = [
                (float(check["what"].split(":")[0].removeprefix("batches of ")), check["value"])
                for check in checks
                if check["what"].endswith(f": {rate}")
            ]
            if points:
                own["one H200" if shape.suffix else "two cores"] = [points]
    return plot_panels(
        [Panel(rate, lines[rate], form) for rate, form in panels.items()], "examples of a batch"
    )


if __name__ == "__main__":
    raise SystemExit(main())
