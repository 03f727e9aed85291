"""pyright accepts the code's types."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mlx_parallm.peers.child_process import run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def test_pyright_finds_nothing() -> None:
    done = run(
        ["pyright", "--pythonpath", sys.executable],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
