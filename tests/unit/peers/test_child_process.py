"""Children end with the process that started them, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mlx_parallm.peers import child_process
from mlx_parallm.peers.child_process import COMMAND, PARENT, ChildProcess

MODULE = ["http.server", "--bind", "127.0.0.1", "0"]
SCRIPT = "import signal; print('begun', flush=True); signal.pause()"
#: It starts the child, and a bystander that inherits every descriptor that can be inherited.
PARENT_SCRIPT = f"""
import signal, subprocess, sys
from mlx_parallm.peers.child_process import ChildProcess
# A shell lets what it runs in the background ignore this signal.
signal.signal(signal.SIGINT, signal.default_int_handler)
child = ChildProcess(sys.argv[1:])
wait = [sys.executable, "-c", "import signal; signal.pause()"]
bystander = subprocess.Popen(wait, close_fds=False, stdout=subprocess.DEVNULL)
print(bystander.pid, flush=True)
{SCRIPT}
"""


@contextmanager
def parent_of(*target: str) -> Iterator[subprocess.Popen[str]]:
    """Yield the parent of such a child; its output ends when both have ended."""
    command = [sys.executable, "-c", PARENT_SCRIPT, *target]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        assert parent.stdout is not None
        lines = iter(parent.stdout.readline, "begun\n")
        bystander = next(int(line) for line in lines if line.strip().isdigit())
        try:
            yield parent
        finally:
            os.kill(bystander, signal.SIGKILL)
            parent.kill()


@pytest.mark.parametrize(
    "target", [MODULE, [COMMAND, sys.executable, "-c", SCRIPT]], ids=["module", "command"]
)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_child_ends_with_its_parent(target: list[str], how: int) -> None:
    with parent_of(*target) as parent:
        parent.send_signal(how)
        # The read ends once no process has the pipe open.
        parent.communicate()


def test_a_child_ends_with_a_parent_that_made_no_pipe() -> None:
    """Start a child as the Makefile does."""
    link = f"{sys.executable} -m mlx_parallm.peers.child_process {PARENT}"
    with subprocess.Popen(
        ["sh", "-c", f"{link} {COMMAND} sh -c 'echo begun; exec sleep 600' & wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"begun\n"
        parent.kill()
        parent.stdout.read()


def test_a_child_is_like_any_other_process() -> None:
    script = "import sys; print(sys.stdin.read() + '!', *sys.argv[1:]); sys.exit(3)"
    for target in (["timeit", "-h"], [COMMAND, sys.executable, "-c", script, "-a", "b"]):
        done = child_process.run(target, data="hello", stdout=subprocess.PIPE, text=True)
        expected = subprocess.run(
            [sys.executable, "-m", *target] if target[0] != COMMAND else target[1:],
            input="hello",
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (expected.returncode, expected.stdout)


def test_a_signal_reaches_the_child() -> None:
    for target, status in ((MODULE, -signal.SIGTERM), ([COMMAND, "sleep", "600"], 143)):
        with ChildProcess([*target], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
            child.terminate()
        # A process has no handler early in its start.
        assert child.returncode in (status, -signal.SIGTERM)


def test_a_child_that_takes_too_long_is_ended() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        child_process.run([COMMAND, "sleep", "600"], timeout_s=0.01)  # time limit: the subject


def test_a_child_that_cannot_start_leaves_no_descriptor(tmp_path) -> None:
    before = os.dup(0)
    os.close(before)
    with pytest.raises(FileNotFoundError):
        ChildProcess(MODULE, cwd=tmp_path / "nowhere")
    after = os.dup(0)
    os.close(after)
    assert after == before
