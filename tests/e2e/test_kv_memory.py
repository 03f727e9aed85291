"""The command ends with one line if memory cannot be allocated."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from mlx_parallm.peers import child_process
from tests.server_process import ROOT

pytestmark = pytest.mark.slow

LIMIT = 14_000_000 * 1024


def limit_addresses() -> None:
    """Limit the address space as ``ulimit -v 14000000`` does."""
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not limit address spaces")
@pytest.mark.parametrize("more", [[], ["--engine-process"]], ids=["thread", "process"])
def test_more_than_the_limits_allow_is_one_line(more: list[str]) -> None:
    flags = ["--port", "0", "--log-level", "warning", "--kv-cache-memory-bytes", "60GiB", *more]
    ended = child_process.run(
        ["mlx_parallm", "serve", *flags],
        stderr=subprocess.PIPE,
        cwd=ROOT,
        preexec_fn=limit_addresses,
        text=True,
    )
    assert ended.returncode == 2, ended.stderr
    errors = [line for line in ended.stderr.splitlines() if not line.startswith("Loading ")]
    assert len(errors) == 1
    assert errors[0].startswith("mlx_parallm serve: error: --kv-cache-memory-bytes is 60 GiB; ")
