"""Targets and whether they were met: the small table and the JSON file of each benchmark."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from mlx_parallm.bench.report import finite

RESULTS = Path("results")


@dataclass(frozen=True, slots=True)
class Check:
    """One figure against its target; no ``limit`` makes it information only."""

    what: str
    value: float
    relation: Literal[">=", "<=", "=="] = ">="
    limit: float | None = None

    @property
    def verdict(self) -> str:
        """PASS, FAIL, or empty where there is no target."""
        if self.limit is None:
            return ""
        if math.isnan(self.value):
            return "FAIL"
        met = {
            ">=": self.value >= self.limit,
            "<=": self.value <= self.limit,
            "==": self.value == self.limit,
        }
        return "PASS" if met[self.relation] else "FAIL"


def conclude(
    name: str, checks: Sequence[Check], details: dict[str, Any], folder: Path = RESULTS
) -> int:
    """Print the table, write ``FOLDER/NAME.json`` and return the exit status."""
    width = max(len(check.what) for check in checks)
    print()
    for check in checks:
        target = "" if check.limit is None else f"{check.relation} {check.limit:g}"
        print(f"{check.what:<{width}}  {check.value:>10.3f}  {target:<9} {check.verdict}".rstrip())
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    rows = [asdict(check) | {"verdict": check.verdict} for check in checks]
    content = {"machine": machine(), "checks": rows, "details": details}
    path.write_text(json.dumps(_json(content), indent=1) + "\n")
    print(f"written to {path}")
    return int(any(check.verdict == "FAIL" for check in checks))


def machine() -> dict[str, Any]:
    """Return what a reader must know to place the figures."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "mlx": _version("mlx", "mlx.core"),
        "mlx_lm": _version("mlx-lm", "mlx_lm"),
    }


def _commit() -> str:
    """Return the commit of the working folder; empty where there is no git."""
    if shutil.which("git") is None:
        return ""
    result = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return result.stdout.strip()


def _version(name: str, module: str) -> str:
    """Return a package's version; its module knows it where it was unpacked without metadata."""
    try:
        return version(name)
    except PackageNotFoundError:
        return str(getattr(import_module(module), "__version__", "?"))


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    lines = cpuinfo.read_text().splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _json(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    return finite(value)
