"""Tries every architecture of mlx_lm that has a method ``shard`` over ranks of one machine.

``python -m benchmarks.architectures --ranks 2`` writes the section on it of docs/models.md;
``python -m benchmarks.architectures_over_ranks OUTPUT NAME`` is one rank, started by that.
"""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlx_lm.utils import MODEL_REMAPPING

from mlx_parallm.worker.device.ranks import join_ranks
from tests.builders.architectures.trial import try_ranks
from tests.cluster.rank_processes import run_ranks

#: HEADING begins the section, which is the last of the page.
HEADING = "## Over ranks"
# TOLERANCE is the largest difference of a log-probability that sums in another order explain.
TOLERANCE = 1e-4
INTRO = """
Several processes, the ranks, can compute one model: each has a part of every layer.
The method `shard` of mlx_lm's models says how layers are cut.
`python -m benchmarks.architectures --ranks {size}` tried every architecture that has it.
Weights were tiny, random and float32, on one CPU.
The difference is the largest of any log-probability from the whole model in one process.

{summary}

These `model_type`s are read by one of them: {aliases}.
All other architectures are refused at load, before any weight is read.
So are models with numbers of heads that the ranks do not divide.
A tower of images is left out with a warning in the log: the model is served for texts alone.

| architecture | path over {size} ranks | difference |
|---|---|---|
"""


def shardable(names: Iterable[str]) -> list[str]:
    """Return the architectures whose model has a method ``shard``."""
    return [name for name in names if hasattr(_model_of(name), "shard")]


def _model_of(name: str) -> type | None:
    try:
        module = importlib.import_module(f"mlx_lm.models.{name}")
    # A module whose own package is missing may end the process.
    except (ImportError, SystemExit):
        return None
    return getattr(module, "Model", None)


def try_over_ranks(name: str, size: int) -> dict[str, Any]:
    """Return rank 0's result of ``try_ranks``, with ``error`` if a rank failed."""
    with TemporaryDirectory() as folder:
        target = [__spec__.name, name]
        try:
            results = run_ranks(size, Path(folder), target)
        except (AssertionError, subprocess.TimeoutExpired) as failure:
            last = (str(failure).strip().splitlines() or ["failed"])[-1]
            return {"error": last}
    return results[0]


def with_section(page: str, section: str) -> str:
    """Return a page with this section at its end, instead of the one that it has."""
    return f"{page.partition(HEADING)[0].rstrip()}\n\n{section}" if section else page


def section_of(page: str) -> str:
    """Return the section of a page; "" if it has none."""
    _, heading, rest = page.partition(HEADING)
    return heading + rest


def section(results: dict[str, dict[str, Any]], size: int) -> str:
    """Return the section on the results of ``try_over_ranks``, by architecture."""
    tried = {name: result for name, result in results.items() if "path" in result}
    exact = sum(result["difference"] <= TOLERANCE for result in tried.values())
    summary = f"{exact} of {len(results)} architectures agree with it within {TOLERANCE:.0e}."
    aliases = sorted(alias for alias, name in MODEL_REMAPPING.items() if name in tried)
    text = (
        HEADING
        + "\n"
        + INTRO.format(
            size=size,
            summary=summary,
            aliases=", ".join(f"`{alias}`" for alias in aliases),
        )
    )
    for name, result in tried.items():
        text += f"| {name} | {result['path']} | {result['difference']:.0e} |\n"
    refused = {name: result["refused"] for name, result in results.items() if "refused" in result}
    failed = {name: result["error"] for name, result in results.items() if "error" in result}
    return text + _list("Refused at load:", refused) + _list("Not tried:", failed)


def _list(title: str, entries: dict[str, str]) -> str:
    lines = "".join(f"- {name}: {text[:200]}\n" for name, text in entries.items())
    return f"\n{title}\n\n" + (lines or "- none\n")


def main() -> None:
    """Try an architecture as one rank."""
    output, name = sys.argv[1:]
    Path(output).write_bytes(pickle.dumps(try_ranks(name, join_ranks("ring"))))


if __name__ == "__main__":
    main()
