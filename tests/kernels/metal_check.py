"""Metal kernels checked by clang, as C++ for OpenCL: it has Metal's address spaces."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.kernels.shim_compile import SHIM

#: ``ABSENT``: Metal has no variables of a program that are not constant. It has no pointers to any
#: address space either, but without those clang copies no structures (see test_texts.py).
#: Queues of a device need the former. It has no `double`.
ABSENT = ",".join(
    f"-{feature}"
    for feature in (
        *("__opencl_c_program_scope_global_variables", "__opencl_c_device_enqueue"),
        *("__opencl_c_fp64", "cl_khr_fp64"),
    )
)
COMMAND = (
    *("-x", "cl", "-cl-std=clc++2021", "-Xclang", f"-cl-ext={ABSENT}", "--target=spir64"),
    *("-fsyntax-only", "-Werror", "-Wno-unknown-pragmas", f"-I{SHIM}", "-include", "opencl.h", "-"),
)
#: ``SHARED``: an array that the threads of a threadgroup share; all of them have 32 KiB.
SHARED = re.compile(r"^threadgroup \w+ (\w+)\[.*$", re.MULTILINE)
SHARED_BYTES = 32 << 10
#: ``ATTRIBUTE``: where Metal finds an argument, which OpenCL does not say.
ATTRIBUTE = re.compile(r" ?\[\[\w+(\(\d+\))?\]\]")


@functools.cache
def clang() -> str | None:
    """Return the path of a clang that reads C++ for OpenCL 2021; None if there is none."""
    path = shutil.which("clang")
    return path if path and _complaint(path, "kernel void nothing() {}") is None else None


def require_clang() -> str:
    """Return clang's path; without it, skip the test, which ``.ci/run`` reports."""
    path = clang()
    if path is None:
        pytest.skip("no clang 14 or later: Metal's texts were not checked")
    return path


def complaints(sources: Sequence[str]) -> list[str]:
    """Return what clang says of the Metal sources that are wrong."""
    path = require_clang()
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        checked = threads.map(functools.partial(_complaint, path), map(in_opencl, sources))
        return [complaint for complaint in checked if complaint is not None]


def in_opencl(source: str) -> str:
    """Return a Metal kernel in the words of OpenCL, which asserts that it shares little memory."""
    names = [match[1] for match in SHARED.finditer(source)]
    # A declaration may be behind an #if.
    source = SHARED.sub(r"\g<0>\n#define BYTES_OF_\1 sizeof(\1)", source)
    ends = "".join(
        f"\n#ifndef BYTES_OF_{name}\n#define BYTES_OF_{name} 0\n#endif" for name in names
    )
    total = " + ".join(("0", *(f"BYTES_OF_{name}" for name in names)))
    body, end = source.rsplit("}", 1)
    check = f'{ends}\nstatic_assert({total} <= {SHARED_BYTES}, "threadgroup memory");\n'
    kernel = f"{body}{check}}}{end}".replace("[[kernel]] void", "kernel void")
    return ATTRIBUTE.sub("", kernel)


def _complaint(path: str, source: str) -> str | None:
    done = subprocess.run(
        [path, *COMMAND], input=source, capture_output=True, text=True, check=False
    )
    return done.stderr if done.returncode else None
