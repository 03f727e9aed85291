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
#: Queues of a device need the former.
ABSENT = "-__opencl_c_program_scope_global_variables,-__opencl_c_device_enqueue"
COMMAND = (
    *("-x", "cl", "-cl-std=clc++2021", "-Xclang", f"-cl-ext={ABSENT}", "--target=spir64"),
    *("-fsyntax-only", "-Werror", "-Wno-unknown-pragmas", f"-I{SHIM}", "-include", "opencl.h", "-"),
)
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
    """Return a Metal kernel in the words of OpenCL."""
    return ATTRIBUTE.sub("", source.replace("[[kernel]] void", "kernel void"))


def _complaint(path: str, source: str) -> str | None:
    done = subprocess.run(
        [path, *COMMAND], input=source, capture_output=True, text=True, check=False
    )
    return done.stderr if done.returncode else None
