"""Measure encoder-decoders: batches against one source after the other, and what runs beside them.

On a CPU, ``python -m benchmarks.seq2seq``: a model of T5-small's shape in float32, 16 sources of 20
to 109 tokens, 32 new tokens each. ``--reference-python PYTHON`` measures CTranslate2 too, with the
same number of threads; PYTHON needs ctranslate2 and NumPy. Every measurement is a process of its
own, those of both sides take turns, and medians are compared. The times are processor seconds where
there is one thread, because other work of a machine changes those less.

On a GPU, ``python -m benchmarks.seq2seq --gpu``: the shapes of T5-3B and BART-large in bfloat16,
sources of 512 tokens and 128 new ones in batches of 1, 32 and 128; sources of 2,000 tokens (BART:
1,000) that arrive beside 16 streams; 16 streams beside a search with 4 beams. ``--shapes tiny-t5
--tiny`` tries all of it on a CPU, without targets.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.checks import RESULTS, Check, conclude
from benchmarks.make_seq2seq import SHAPES, make_seq2seq
from mlx_parallm.peers import child_process

SHORTEST, LONGEST, SOURCES, NEW_TOKENS = 20, 109, 16, 32
LEAST_BATCH, LEAST_OF_PEER, LEAST_OF_PEER_ALONE = 6.0, 0.8, 0.5
#: ``LEAST_OF_BATCH``: tokens/s of a batch over those of one source after the other, on a GPU.
LEAST_OF_BATCH = {32: 6.0, 128: 20.0}
LEAST_OF_FLOOR, MOST_GAP, LEAST_STREAMS = 0.55, 2.0, 0.85
GPU_SOURCE, GPU_TOKENS, STREAMS, ARRIVALS, BEAMS = 512, 128, 16, 12, 4
# ARRIVING: tokens of sources that arrive beside streams; BART has learned 1,024 positions.
ARRIVING = {"t5": 2000, "bart": 1000}
STALL_MS = 100.0

Figures = dict[str, Any]


def main() -> int:
    args = make_parser().parse_args()
    if args.gpu or args.tiny:
        return on_gpu(args)
    return on_cpu(args)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.seq2seq",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of both sides, on a CPU")
    parser.add_argument("--reference-python", metavar="PYTHON", help="has ctranslate2 and NumPy")
    parser.add_argument("--gpu", action="store_true", help="the measurements for a GPU")
    parser.add_argument("--tiny", action="store_true", help="the same, small enough for a CPU")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["t5-3b", "bart-large"])
    parser.add_argument("--parts", nargs="+", choices=GPU_PARTS, default=list(GPU_PARTS))
    parser.add_argument("--max-decode-stall-ms", type=float, default=STALL_MS)
    return parser


def on_cpu(args: argparse.Namespace) -> int:
    """Compare a batch with one source after the other, and both with CTranslate2."""
    model = make_seq2seq(RESULTS / "seq2seq_t5-small", "t5-small")
    draw = random.Random(0)
    lengths = [draw.randint(SHORTEST, LONGEST) for _ in range(SOURCES)]
    job = {"sources": lengths, "max_tokens": NEW_TOKENS, "batch": SOURCES, "alone": SOURCES // 2}
    own: list[Figures] = []
    peer: list[Figures] = []
    for _ in range(args.repetitions):
        own.append(measure(model, "rates", args, **job))
        report("mlx_parallm", own[-1], args)
        if args.reference_python:
            peer.append(measure_peer(model, args, own[-1]))
            report("CTranslate2", peer[-1], args)
    checks = cpu_checks(own, peer, args)
    return conclude("seq2seq", checks, {"own": own, "ctranslate2": peer, "threads": args.threads})


def report(name: str, figures: Figures, args: argparse.Namespace) -> None:
    """Print the tokens a second of one process."""
    batch, alone = rate(figures["batch"], args), rate(figures["alone"], args)
    print(f"{name}: {batch:.1f} tokens/s in a batch, {alone:.1f} alone", flush=True)


def rate(figures: Figures, args: argparse.Namespace) -> float:
    """Return tokens a second; of processor time where there is one thread."""
    return figures["tokens"] / figures["cpu_s" if args.threads == 1 else "wall_s"]


def cpu_checks(
    own: Sequence[Figures], peer: Sequence[Figures], args: argparse.Namespace
) -> list[Check]:
    """Return medians and the medians of ratios within a repetition."""

    def median(sides: Sequence[Figures], name: str) -> float:
        return statistics.median(rate(each[name], args) for each in sides)

    def ratio(name: str) -> float:
        pairs = zip(own, peer, strict=True)
        return statistics.median(rate(a[name], args) / rate(b[name], args) for a, b in pairs)

    gain = statistics.median(rate(e["batch"], args) / rate(e["alone"], args) for e in own)
    same = [all(each["equal"]) for each in own]
    checks = [
        Check(f"batch of {SOURCES}: tokens/s", median(own, "batch")),
        Check("alone: tokens/s", median(own, "alone")),
        Check("batch over alone", gain, ">=", LEAST_BATCH),
        Check("batch and alone have the same tokens", float(all(same)), "==", 1.0),
    ]
    if peer:
        checks += [
            Check(f"CTranslate2, batch of {SOURCES}: tokens/s", median(peer, "batch")),
            Check("CTranslate2, alone: tokens/s", median(peer, "alone")),
            Check("batch over CTranslate2's", ratio("batch"), ">=", LEAST_OF_PEER),
            Check("alone over CTranslate2's", ratio("alone"), ">=", LEAST_OF_PEER_ALONE),
            Check("sources with CTranslate2's tokens", shared(own[0], peer[0])),
        ]
    return checks


def shared(own: Figures, peer: Figures) -> float:
    """Return the share of sources for which both sides write the same tokens."""
    pairs = list(zip(own["tokens"], peer["tokens"], strict=True))
    return sum(ours == theirs for ours, theirs in pairs) / len(pairs)


def environment(threads: int) -> dict[str, str]:
    """Return the environment of a child with this many threads."""
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
    return {**os.environ, **dict.fromkeys(names, str(threads))}


def measure(model: Path, part: str, args: argparse.Namespace, **job: Any) -> Figures:
    """Return the figures of a part of ``benchmarks.seq2seq.engine`` in a process of its own."""
    content = {"part": part, "model": str(model.resolve()), **job}
    done = child_process.run(
        ["mlx_parallm.process_setup.openblas", "benchmarks.seq2seq.engine"],
        data=json.dumps(content),
        env=environment(args.threads) if not args.gpu else None,
        stdout=subprocess.PIPE,
        text=True,
    )
    done.check_returncode()
    return json.loads(done.stdout.splitlines()[-1])


def measure_peer(model: Path, args: argparse.Namespace, own: Figures) -> Figures:
    """Return the figures of CTranslate2 for the sources of a measurement."""
    job = own["job"] | {"sources": own["sources"], "threads": args.threads}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.json"
        file.write_text(json.dumps(job))
        script = Path(__file__).with_name("reference.py")
        done = subprocess.run(
            [args.reference_python, str(script), str(model), str(file)],
            env=environment(args.threads),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return json.loads(done.stdout.splitlines()[-1])


def on_gpu(args: argparse.Namespace) -> int:
    """Run the parts for a GPU with each shape."""
    checks: list[Check] = []
    details: Figures = {}
    for shape in args.shapes:
        model = make_seq2seq(RESULTS / f"seq2seq_{shape}", shape)
        for part in args.parts:
            measured, figures = GPU_PARTS[part](model, shape, args)
            if args.tiny:
                measured = [replace(check, limit=None) for check in measured]
            checks += measured
            details[f"{shape}, {part}"] = figures
            print(
                shape, part, *(f"{c.what}: {c.value:.3g}" for c in measured), sep="; ", flush=True
            )
    name = "seq2seq_gpu" if args.gpu else "seq2seq_tiny"
    if args.parts != list(GPU_PARTS):
        name = "_".join([name, *args.parts])
    return conclude(name, checks, details)


def sized(args: argparse.Namespace, count: int) -> int:
    """Return a length or a number of rows, an eighth of it with ``--tiny``."""
    return max(2, count // 8) if args.tiny else count


def batches_part(model: Path, shape: str, args: argparse.Namespace) -> tuple[list[Check], Figures]:
    """Compare batches with one source after the other."""
    length, new = sized(args, GPU_SOURCE), sized(args, GPU_TOKENS)
    checks: list[Check] = []
    details: Figures = {}
    for rows in (32, 128):
        count = sized(args, rows)
        job = {"sources": [length] * count, "max_tokens": new, "batch": count, "alone": 4}
        runs = [measure(model, "rates", args, **job) for _ in range(args.repetitions)]
        gains = [rate_of(each["batch"]) / rate_of(each["alone"]) for each in runs]
        single = statistics.median(rate_of(each["alone"]) for each in runs)
        many = statistics.median(rate_of(each["batch"]) for each in runs)
        gain = statistics.median(gains)
        checks += [
            Check(f"{shape}, 1 row: tokens/s", single),
            Check(f"{shape}, {count} rows: tokens/s", many),
            Check(f"{shape}, {count} rows over 1", gain, ">=", LEAST_OF_BATCH[rows]),
        ]
        if "floor_ms" in runs[0]:
            share = statistics.median(each["floor_ms"] / each["gap_ms"] for each in runs)
            limit = LEAST_OF_FLOOR if (shape, rows) == ("t5-3b", 128) else None
            what = f"{shape}, {count} rows: share of the floor of a decode step"
            checks.append(Check(what, share, ">=", limit))
        details[f"{count} rows"] = runs
    return checks, details


def rate_of(figures: Figures) -> float:
    """Return tokens a second."""
    return figures["tokens"] / figures["wall_s"]


def arrivals_part(model: Path, shape: str, args: argparse.Namespace) -> tuple[list[Check], Figures]:
    """Measure the gaps of streams while long sources arrive, without a limit and with one."""
    long = sized(args, ARRIVING[SHAPES[shape]["model_type"]])
    job = {
        "sources": [sized(args, GPU_SOURCE)] * sized(args, STREAMS),
        "batch": sized(args, STREAMS) + 4,
        "max_tokens": GPU_TOKENS,
        "arriving": (ARRIVALS, long),
        "stall_ms": args.max_decode_stall_ms,
    }
    runs = [measure(model, "arrivals", args, **job) for _ in range(args.repetitions)]
    ratio = statistics.median(each["beside_p99_ms"] / each["alone_p99_ms"] for each in runs)
    most = statistics.median(each["beside_most_ms"] for each in runs)
    what = f"{shape}: sources of {long} tokens among streams"
    return [
        Check(f"{what}: gap p99 over alone", ratio, "<=", MOST_GAP),
        Check(f"{what}: longest gap, ms", most, "<=", args.max_decode_stall_ms),
    ], {"runs": runs}


def beams_part(model: Path, shape: str, args: argparse.Namespace) -> tuple[list[Check], Figures]:
    """Measure the tokens a second of streams beside a beam search."""
    job = {
        "sources": [sized(args, GPU_SOURCE)] * sized(args, STREAMS),
        "batch": sized(args, STREAMS),
        "max_tokens": sized(args, GPU_TOKENS),
        "beams": BEAMS,
    }
    runs = [measure(model, "beams", args, **job) for _ in range(args.repetitions)]
    share = statistics.median(rate_of(each["beside"]) / rate_of(each["alone"]) for each in runs)
    what = f"{shape}: streams beside {BEAMS} beams, tokens/s over alone"
    return [Check(what, share, ">=", LEAST_STREAMS)], {"runs": runs}


GPU_PARTS = {"batches": batches_part, "arrivals": arrivals_part, "beams": beams_part}

if __name__ == "__main__":
    sys.exit(main())
