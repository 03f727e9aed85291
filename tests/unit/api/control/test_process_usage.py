"""Resources of processes, as the operating system reports them."""

from __future__ import annotations

import os
import sys
from subprocess import PIPE

import pytest

from mlx_parallm.api.control.server.process_usage import usage_families, usage_of_processes
from mlx_parallm.peers.child_process import ChildProcess

WAITS = "import sys; sys.stdout.write('x'); sys.stdout.flush(); sys.stdin.read()"


def test_this_process_is_there() -> None:
    own = next(usage for usage in usage_of_processes() if usage.pid == os.getpid())
    assert own.role == "server"
    assert own.cpu_s > 0
    assert own.peak_bytes >= own.resident_bytes > 10 << 20
    assert own.num_descriptors >= 3


@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell of this process only")
def test_descendants_are_there_until_they_end() -> None:
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WAITS!r}])"
    with ChildProcess(["--", sys.executable, "-c", code], stdin=PIPE, stdout=PIPE) as child:
        assert child.stdout is not None
        child.stdout.read(1)
        pids = {usage.pid for usage in usage_of_processes()}
        child.kill()
    assert {os.getpid(), child.pid} < pids
    assert len(pids) >= 3
    assert child.pid not in {usage.pid for usage in usage_of_processes()}


def test_metrics_have_a_sample_for_each_process() -> None:
    families = usage_families()
    assert [family.name for family in families] == [
        f"mlx_parallm:process_{name}"
        for name in ("cpu_seconds", "resident_memory_bytes", "peak_memory_bytes", "open_fds")
    ]
    for family in families:
        assert str(os.getpid()) in [sample.labels["pid"] for sample in family.samples]
