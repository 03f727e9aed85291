"""The table of figures on a GPU, row by row.

``python -m benchmarks.gpu`` measures what ``results/gpu.json`` does not have yet, in order of
priority, and writes the file after every row. ``--write-docs`` takes the file's figures into
``benchmarks/gpu/published.json`` and puts the tables of these into ``benchmarks/results/gpu.md``.
``--shrink`` runs every row at sizes for a CPU, to see that it runs.
"""

from __future__ import annotations

import argparse
import gc
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import mlx.core as mx

from benchmarks.figures import write_index
from benchmarks.gpu.bench import Bench, Outcome, Row, Sizes
from benchmarks.gpu.rows import all_rows
from benchmarks.gpu.store import Results, about_run
from benchmarks.gpu.tables import write_tables

RESULTS = Path("results/gpu.json")
#: ``PUBLISHED``: the latest figures of every row, which the page shows.
PUBLISHED = Path(__file__).with_name("published.json")
SHRUNK_RESULTS = Path("results/gpu-shrunk.json")


class RowTimeout(BaseException):
    """A row took too long. An engine would answer an ``Exception`` and go on."""


def main() -> int:
    args = make_parser().parse_args()
    rows = all_rows()
    results = Results(args.results or (SHRUNK_RESULTS if args.shrink else RESULTS))
    chosen = choose(rows, args.rows, results)
    if args.list:
        for row in rows:
            print(f"{_state(row, results):<9}{row.name:<28}{row.table:<12}{row.what}")
    elif args.write_docs and args.shrink:
        sys.exit("figures of --shrink are none for the docs")
    elif args.write_docs:
        published = Results(PUBLISHED)
        published.take(results)
        write_tables(rows, published.rows)
        write_index()
    else:
        bench = Bench(Sizes.tiny() if args.shrink else Sizes())
        run(bench, chosen, results, args)
    return int(any(results.has_failed(row.name) for row in chosen))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--rows", nargs="+", default=["*"], help="names, or patterns like 'floor*'")
    parser.add_argument("--list", action="store_true", help="the rows and which are measured")
    parser.add_argument("--write-docs", action="store_true", help="tables into the docs, no run")
    parser.add_argument("--budget-s", type=float, help="begin no row after this many seconds")
    parser.add_argument("--row-s", type=float, default=240, help="give a row up after this long")
    parser.add_argument("--shrink", action="store_true", help="sizes for a CPU; a file of its own")
    parser.add_argument("--results", type=Path, help=f"the file, {RESULTS} if not given")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    return parser


def choose(rows: Sequence[Row], patterns: Sequence[str], results: Results) -> list[Row]:
    """Return the matching rows without figures; rows that failed before come last."""
    matching = [row for row in rows if any(fnmatch(row.name, pattern) for pattern in patterns)]
    left = [row for row in matching if not results.is_measured(row.name)]
    return sorted(left, key=lambda row: results.has_failed(row.name))


def run(bench: Bench, rows: Sequence[Row], results: Results, args: argparse.Namespace) -> None:
    """Measure rows until the time is over; a failure is recorded and the next row continues."""
    begin = time.monotonic()
    about_run(args.commit)  # a failure here must not cost a row
    for row in rows:
        if args.budget_s is not None and time.monotonic() - begin > args.budget_s:
            print("out of time", flush=True)
            return
        results.begin(row.name)
        started = time.monotonic()
        outcome, error = attempt(bench, row, args.row_s)
        about: dict[str, Any] = about_run(args.commit)
        about["seconds"] = round(time.monotonic() - started, 1)
        if outcome is not None:
            results.add(row.name, outcome, about)
            print(f"{row.name}: {results.rows[row.name]['values']}", end=" ")
            print(f"{results.rows[row.name]['figures']} in {about['seconds']} s", flush=True)
        else:
            results.fail(row.name, error, about)
            print(f"{row.name}: failed, {error}", flush=True)
            bench.release()


def attempt(bench: Bench, row: Row, limit_s: float) -> tuple[Outcome | None, str]:
    """Return a row's figures, or why there are none."""
    try:
        with time_limit(limit_s):
            return row.measure(bench), ""
    except RowTimeout:
        return None, f"not done in {limit_s:g} s"
    except Exception as cause:  # noqa: BLE001 - whatever one row meets, the others are measured
        return None, f"{type(cause).__name__}: {cause}"
    finally:
        gc.collect()
        mx.clear_cache()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise ``RowTimeout`` in the block once the time is over."""

    def stop(*_: object) -> None:
        raise RowTimeout

    previous = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def _state(row: Row, results: Results) -> str:
    if results.is_measured(row.name):
        return "measured"
    return "failed" if results.has_failed(row.name) else ""


if __name__ == "__main__":
    sys.exit(main())
