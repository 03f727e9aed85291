"""A server whose ranks ``mlx.launch`` starts, with faults that can be made on any of them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import httpx2

from benchmarks.servers import ServerError
from mlx_parallm.peers.child_process import ChildProcess

# LAUNCH: what the command mlx.launch does.
LAUNCH = "from mlx._distributed_utils.launch import main; main()"
POLL_S = 0.1
# SECONDS_STOPPED: after so long a stopped rank goes on, or its launcher would wait for ever.
SECONDS_STOPPED = 20
# RANK runs the command ``mlx_parallm`` as one rank. The launcher passes its standard input on to
# all ranks, so rank 1 can be sent "kill 1". Its end stops rank 0.
RANK = f"""
import os, signal, subprocess, sys, threading

def obey(commands, rank):
    while True:
        command, which = os.read(commands, 100).decode().split() or ("end", "0")
        if which != rank:
            continue
        if command == "end":
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if command == "stop":
            wake = "sleep {SECONDS_STOPPED}; kill -CONT " + str(os.getpid())
            null = subprocess.DEVNULL
            subprocess.Popen(["sh", "-c", wake], stdin=null, stdout=null, stderr=null)
        os.kill(os.getpid(), signal.SIGKILL if command == "kill" else signal.SIGSTOP)

commands = os.dup(0)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
threading.Thread(target=obey, args=(commands, os.environ["MLX_RANK"]), daemon=True).start()
from mlx_parallm.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def launch_command(hostfile: Path, command: Sequence[str]) -> list[str]:
    """Return mlx.launch with a command, as a target of ``ChildProcess``."""
    content: Any = json.loads(hostfile.read_text())
    hosts = content["hosts"] if isinstance(content, dict) else content
    # mlx.launch gives each rank of a machine its own GPU only if it knows how many there are.
    most = max(Counter(host["ssh"] for host in hosts).values())
    flags = ["--hostfile", str(hostfile), "-n", str(most)]
    return ["--", sys.executable, "-c", LAUNCH, *flags, "--", *command]


class LaunchedWorld:
    """A server over the ranks of a hostfile, whose rank 0 is on this machine.

    Attributes:
        base_url: its address.
    """

    def __init__(
        self, hostfile: Path, flags: Sequence[str], port: int, log: Path, python: str
    ) -> None:
        """Start it.

        Args:
            hostfile: of mlx.launch.
            flags: of ``mlx_parallm serve``.
            port: of rank 0.
            log: gets what all ranks print.
            python: the interpreter of all ranks.
        """
        self.base_url = f"http://127.0.0.1:{port}"
        command = [python, "-c", RANK, "serve", "--port", str(port), *flags]
        self._log = log
        with log.open("ab") as output:
            self._process = ChildProcess(
                launch_command(hostfile, command),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def is_running(self) -> bool:
        """True until all ranks have ended."""
        return self._process.poll() is None

    def wait_until_ready(self, timeout_s: float) -> None:
        """Return once ``/health`` answers 200.

        Raises:
            ServerError: the ranks have ended, or are not healthy in time.
        """
        until = time.monotonic() + timeout_s
        while not self._is_healthy():
            if not self.is_running or time.monotonic() > until:
                lines = self._log.read_text(errors="replace").splitlines()[-20:]
                raise ServerError("\n".join(["the ranks do not serve:", *lines]))
            time.sleep(POLL_S)

    def _is_healthy(self) -> bool:
        try:
            return httpx2.get(f"{self.base_url}/health").status_code == 200
        except httpx2.TransportError:
            return False

    def tell(self, command: Literal["end", "kill", "stop"], rank: int) -> None:
        """Let a rank end, or do to it what SIGKILL or SIGSTOP does."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command} {rank}\n".encode())
        self._process.stdin.flush()

    def wait(self, timeout_s: float) -> None:
        """Wait until all ranks have ended; raise ``TimeoutExpired`` if they do not."""
        self._process.wait(timeout_s)

    def close(self) -> None:
        """End what still runs."""
        self._process.close_link()
        self._process.wait()
