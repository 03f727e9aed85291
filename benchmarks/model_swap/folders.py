"""The start of a server whose requests may name many folders."""

from __future__ import annotations

import statistics
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks.checks import Check
from benchmarks.make_model import CONFIG, make_model
from benchmarks.model_swap.http import get
from benchmarks.servers import server_of_folder

MANY = 200
# MOST_START: the start with many folders over that with one.
MOST_START = 1.2


def folders_part(args: Namespace) -> tuple[list[Check], dict[str, Any]]:
    """Measure starts with one folder and with many, in turns."""
    model = make_model(args.folder / "small", config=CONFIG)
    starts: dict[int, list[tuple[float, float]]] = {1: [], MANY: []}
    with tempfile.TemporaryDirectory(prefix="model-swap-") as root:
        for count in starts:
            _link(model, Path(root, str(count)), count)
        for _ in range(args.repetitions + 1):
            for count, seconds in starts.items():
                seconds.append(_start_s(Path(root, str(count)), count))
    # The first start of each reads files that the system has not cached.
    (single_s, single), (many_s, many) = (
        [statistics.median(column) for column in zip(*seconds[1:], strict=True)]
        for seconds in starts.values()
    )
    return [
        Check("start with one folder, s: median", single_s),
        Check(f"start with {MANY} folders, s: median", many_s),
        Check("start with one folder, processor s: median", single),
        Check(f"start with {MANY} folders, processor s: median", many),
        Check(f"start with {MANY} folders over that with one", many / single, "<=", MOST_START),
    ], {"starts_s": {str(count): seconds for count, seconds in starts.items()}}


def _start_s(folder: Path, count: int) -> tuple[float, float]:
    """Return the seconds until a server of all models of a folder is healthy, and the processor's.

    Whatever else runs on the machine, processor time is comparable.
    """
    begin_s = time.perf_counter()
    with server_of_folder(folder) as server:
        start_s = time.perf_counter() - begin_s, server.processor_s()
        names = {card["id"] for card in get(server, "/v1/models")["data"]}
        assert len([name for name in names if name.startswith("model-")]) == count, names
    return start_s


def _link(model: Path, target: Path, count: int) -> None:
    """Make folders with the files of a model."""
    for number in range(count):
        folder = target / f"model-{number}"
        folder.mkdir(parents=True)
        for path in model.iterdir():
            (folder / path.name).hardlink_to(path)
