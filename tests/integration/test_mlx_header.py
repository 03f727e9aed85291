"""MLX's compiler takes the compiled header that the tests make for it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from mlx_parallm.peers.child_process import run
from tests.mlx_header import precompile_header

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or shutil.which("g++") is None, reason="MLX runs no g++ here"
    ),
]

CODE = """
import mlx.core as mx
print(mx.compile(lambda x: mx.sin(x) * x + 1)(mx.arange(3.0)).tolist())
"""
# LOGGING stands for g++, and logs the headers that it reads.
LOGGING = """#!/bin/sh
exec {compiler} -H "$@" 2>> {log}
"""


@pytest.mark.parametrize("is_compiled", [False, True])
def test_kernels_are_compiled_with_the_compiled_header(tmp_path: Path, is_compiled: bool) -> None:
    log, compiler = tmp_path / "log", tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text(LOGGING.format(compiler=shutil.which("g++"), log=log))
    compiler.chmod(0o755)
    variables = {"TMPDIR": str(tmp_path), "PATH": f"{compiler.parent}:{os.environ['PATH']}"}
    if is_compiled:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tempfile.tempdir", str(tmp_path))
            header = precompile_header()
            assert header is not None
            before = header.stat().st_mtime_ns
            assert precompile_header() == header
            assert header.stat().st_mtime_ns == before
    done = run(["--", sys.executable, "-c", CODE], env={**os.environ, **variables})
    assert done.returncode == 0
    assert ("compiled_preamble.h.gch" in log.read_text()) is is_compiled
