"""Rows that other benchmarks measure, each run in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.checks import RESULTS
from benchmarks.gpu.bench import Bench, Outcome
from benchmarks.gpu.engines import MeasureError
from mlx_parallm.peers import child_process

EQUAL = "texts equal to the reference, float32"
GAP = "bf16: the two best logits where texts part, at most"
AGREEMENT = "int8: same likeliest token"
COPY_ALONE, COPY_BATCH = "copying, 1: ratio", "copying, 16: ratio"


def parity(bench: Bench, *, num_prompts: int) -> Outcome:
    """Return the packed path's greedy tokens against ``generate_step``, in both dtypes."""
    bench.release()
    count = bench.sizes.batch(num_prompts)
    results: dict[str, dict[str, Any]] = {}
    for dtype in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "parity.json"
            arguments = ["--num-prompts", str(count), "--dtype", dtype, "--output", str(output)]
            _run("benchmarks.gpu.parity", arguments, output, {"MLX_ENABLE_TF32": "0"})
            results[dtype] = json.loads(output.read_text())
    return Outcome(
        {
            EQUAL: results["float32"]["equal"] / count,
            GAP: results["bfloat16"]["largest gap"],
        },
        {"prompts": count, "bf16 texts equal": results["bfloat16"]["equal"]},
        dict(results),
    )


def own_benchmark(
    bench: Bench,
    *,
    name: str,
    arguments: Sequence[str],
    shrunk: Sequence[str],
    figures: Sequence[str],
) -> Outcome:
    """Run ``benchmarks.NAME`` and return the ``figures`` in its checks.

    ``shrunk`` are its arguments where everything is small.
    """
    bench.release()
    output = RESULTS / f"{name}.json"
    output.unlink(missing_ok=True)
    _run(f"benchmarks.{name}", arguments if bench.sizes.is_full else shrunk, output)
    checks = {check["what"]: check["value"] for check in json.loads(output.read_text())["checks"]}
    missing = [what for what in figures if what not in checks]
    if missing:
        raise MeasureError(f"benchmarks.{name} has no {missing[0]!r}, only {', '.join(checks)}")
    return Outcome({what: checks[what] for what in figures}, {}, checks)


def _run(
    module: str,
    arguments: Sequence[str],
    output: Path,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run a module that writes ``output``; a missed target of its own is no error.

    Raises:
        MeasureError: there is no such module, or it wrote nothing.
    """
    if find_spec(module) is None:
        raise MeasureError(f"there is no {module}")
    done = child_process.run(
        [module, *arguments],
        env=dict(os.environ) | dict(environment or {}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if not output.exists():
        raise MeasureError(f"{module} ended with {done.returncode}: {done.stderr[-400:]}")
