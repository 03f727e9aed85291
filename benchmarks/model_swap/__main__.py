"""Measure models that come and go: beside streams, in turns, and as many folders.

``python -m benchmarks.model_swap``. Its parts, all but ``gpu`` by default:

- ``streams``: 32 streams of the embedded model while a model of 22 million parameters is loaded,
  used and unloaded, ten times, each time after a stretch without it.
- ``room``: 16 clients that name three models at random, with memory for two; once more with
  adapters, and once more with two engines. Answers are compared with those of servers of one model.
- ``folders``: starts with ``--model-dir`` of 200 folders, and of one.
- ``gpu``: 32 streams of Qwen3-0.6B's shape while a model of the 8B shape is loaded, whose files the
  system has not cached. ``--gpu`` measures this part alone.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.checks import Check, conclude
from benchmarks.model_swap.folders import folders_part
from benchmarks.model_swap.room import VARIANTS, room_part
from benchmarks.model_swap.streams import gpu_part, streams_part

Part = Callable[[Namespace], tuple[list[Check], dict[str, Any]]]
PARTS: dict[str, Part] = {
    "streams": streams_part,
    "room": room_part,
    "folders": folders_part,
    "gpu": gpu_part,
}
USUAL = ["streams", "room", "folders"]


def main() -> int:
    args = make_parser().parse_args()
    names = ["gpu"] if args.gpu else args.parts
    checks: list[Check] = []
    details: dict[str, Any] = {}
    for name in names:
        measured, details[name] = PARTS[name](args)
        checks += measured
    return conclude("model_swap_gpu" if args.gpu else "model_swap", checks, details)


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m benchmarks.model_swap",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", nargs="*", default=USUAL, choices=list(PARTS))
    parser.add_argument("--gpu", action="store_true", help="the part gpu alone")
    parser.add_argument(
        "--folder", type=Path, default=Path("results/model-swap"), help="models; made if missing"
    )
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10, help="loads beside streams")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each stretch of streams")
    parser.add_argument("--gpu-shapes", nargs=2, default=["0.6B", "8B"], metavar="SHAPE")
    parser.add_argument("--clients", type=int, default=16, help="of the part room")
    parser.add_argument(
        "--room-seconds", type=float, default=600.0, help="of each run of the part room"
    )
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--repetitions", type=int, default=3, help="of the part folders")
    parser.add_argument(
        "--server-options", default="", help="more flags for mlx_parallm serve, in one argument"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
