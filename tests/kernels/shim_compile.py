"""Compiles programs of the shims, each once."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

SHIM = Path(__file__).parent / "shim"
#: ``FLAGS``: Metal 3 is a dialect of C++14. Without ``-O1``, large tiles take twice as long.
FLAGS = ("-std=c++14", "-O1", "-fPIC", "-shared", "-w", "-U_FORTIFY_SOURCE", "-D_XOPEN_SOURCE=600")
# LIBRARIES leave out the C++ library, which is half of what the linker would read.
LIBRARIES = ("-nodefaultlibs", "-lm", "-lc")


def compiler() -> str | None:
    """Return the path of the C++ compiler; None if there is none."""
    return next((at for name in ("g++", "c++", "clang++") if (at := shutil.which(name))), None)


def require_compiler() -> None:
    """Skip the test; fail it in CI, where nobody would notice a skip."""
    if compiler() is None:
        if os.environ.get("CI"):
            pytest.fail("no C++ compiler: the kernels' texts were not checked")
        pytest.skip("no C++ compiler")


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="mlx_parallm_kernels_")


@functools.cache
def load(source: str) -> Any:
    """Return the library compiled from a program."""
    path = compiler()
    assert path is not None
    with tempfile.NamedTemporaryFile("w", suffix=".cpp", dir=_folder().name, delete=False) as file:
        file.write(source)
    library = file.name.removesuffix(".cpp") + ".so"
    command = [path, *FLAGS, f"-I{SHIM}", file.name, "-o", library, *LIBRARIES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(library)
