"""The header of the kernels that MLX compiles on a CPU, compiled once before them all.

For each new fusion of ``mx.compile`` MLX runs g++, which reads this header for a second of CPU time
and the kernel itself for a tenth of that. It finds a compiled header beside the kernels.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

HEADER = Path("mlx/backend/cpu/compiled_preamble.h")
#: FLAGS of MLX's own compilations: g++ ignores a header that was compiled by others.
FLAGS = ("-std=c++17", "-O3", "-Wall", "-fPIC", "-x", "c++-header")


def precompile_header(folder: Path | None = None) -> Path | None:
    """Compile the header unless that was done; return where it is, None if it cannot be.

    Args:
        folder: where MLX keeps its kernels; None: in the folder for temporary files.
    """
    compiler, include = shutil.which("g++"), _include()
    if compiler is None or include is None:
        return None
    folder = folder or Path(tempfile.gettempdir()) / "mlx" / version("mlx") / "cpu"
    target = folder / HEADER.with_suffix(".h.gch")
    header = include / HEADER
    if target.is_file() and target.stat().st_mtime > header.stat().st_mtime:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Others may compile it too, and MLX may look for it meanwhile.
    with tempfile.TemporaryDirectory(dir=folder) as own:
        made = Path(own) / "header"
        command = [compiler, *FLAGS, f"-I{include}", str(header), "-o", str(made)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return None
        made.replace(target)
    return target


def _include() -> Path | None:
    """Return the folder of MLX's headers; None if there is none."""
    package = find_spec("mlx")
    folders = [] if package is None else list(package.submodule_search_locations or ())
    includes = [Path(folder) / "include" for folder in folders]
    return next((each for each in includes if (each / HEADER).is_file()), None)
