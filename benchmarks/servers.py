"""Starts the servers under measurement, waits until they answer, and ends them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_parallm.peers.child_process import ChildProcess

# START_TIMEOUT_S includes the compilation of kernels on a GPU.
START_TIMEOUT_S = 400.0
STOP_TIMEOUT_S = 30.0
SERVED_NAME = "benchmark"
POLL_S = 0.1
# WITH_OPENBLAS: runs the module that follows with the BLAS that this project's server has.
WITH_OPENBLAS = ("mlx_parallm.process_setup.openblas",)


class ServerError(Exception):
    """A server did not start, or ended early."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server.

    ``model`` is what to send as the request's ``model``; None leaves it out.
    """

    name: str
    base_url: str
    model: str | None
    process: ChildProcess
    log: Path

    def resident_bytes(self) -> int:
        """Return the resident memory of the process (Linux)."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def processor_s(self) -> float:
        """Return the processor seconds of the process and all its threads so far (Linux)."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        """End the process with SIGKILL."""
        self.process.kill()
        self.process.wait()

    def log_tail(self, lines: int = 20) -> str:
        """Return the end of what the server printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


@contextlib.contextmanager
def mlx_lm_server(model: Path, options: Sequence[str] = ()) -> Iterator[Server]:
    """Run ``mlx_lm.server`` of the installed mlx-lm."""
    command = [*WITH_OPENBLAS, "mlx_lm", "server", "--model", str(model), *options]
    with running_server("mlx_lm.server", command, None) as server:
        yield server


@contextlib.contextmanager
def mlx_vlm_server(
    model: Path,
    options: Sequence[str] = (),
    *,
    python: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Run ``mlx_vlm.server``, which its users install themselves.

    Args:
        model: its folder.
        options: more flags.
        python: an interpreter that has it; None is this process's.
        env: more variables of its environment.
    """
    command = [*WITH_OPENBLAS, "mlx_vlm.server", "--model", str(model), *options]
    with running_server("mlx_vlm.server", command, str(model), python, env) as server:
        yield server


@contextlib.contextmanager
def mlx_parallm_server(
    model: Path | None, options: Sequence[str] = (), *, port: int | None = None
) -> Iterator[Server]:
    """Run ``mlx_parallm serve``; without a model it serves the embedded one."""
    command = ["mlx_parallm", "serve", "--served-model-name", SERVED_NAME]
    command += ["--model", str(model)] if model else []
    with running_server("mlx_parallm", [*command, *options], SERVED_NAME, port=port) as server:
        yield server


@contextlib.contextmanager
def server_of_models(models: Mapping[str, Path], options: Sequence[str] = ()) -> Iterator[Server]:
    """Run ``mlx_parallm serve`` with models by name; the server's ``model`` is the first."""
    command = ["mlx_parallm", "serve", "--model", *map(str, models.values())]
    command += ["--served-model-name", *(f"{path}={name}" for name, path in models.items())]
    with running_server("mlx_parallm", [*command, *options], next(iter(models))) as server:
        yield server


@contextlib.contextmanager
def server_of_folder(folder: Path, options: Sequence[str] = ()) -> Iterator[Server]:
    """Run ``mlx_parallm serve`` with no model, but a folder of those that requests may name."""
    command = ["mlx_parallm", "serve", "--model-dir", str(folder)]
    with running_server("mlx_parallm", [*command, *options], None) as server:
        yield server


@contextlib.contextmanager
def running_server(
    name: str,
    target: list[str],
    model: str | None,
    python: Path | None = None,
    env: Mapping[str, str] | None = None,
    port: int | None = None,
) -> Iterator[Server]:
    """Run a module with arguments, ``--host`` and ``--port`` after them, once it is healthy.

    ``python`` and ``env`` are its interpreter and more variables, if they are not those of others;
    without a ``port`` it gets a free one.
    """
    port = port or free_port()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        log = Path(folder) / "log.txt"
        with log.open("wb") as output:
            process = ChildProcess(
                [*target, "--host", "127.0.0.1", "--port", str(port)],
                python=None if python is None else str(python),
                stdout=output,
                stderr=subprocess.STDOUT,
                env=server_environment() | dict(env or {}),
                # With a session of its own the client would wait for busy engines: Linux divides
                # the processor between sessions first (sched_autogroup).
                process_group=0,
            )
        try:
            server = Server(name, f"http://127.0.0.1:{port}", model, process, log)
            _wait_until_healthy(server)
            yield server
        finally:
            _end(process)


def free_port() -> int:
    """Return a port nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def server_environment() -> dict[str, str]:
    """Return the environment of servers, which use nothing but what is on this machine."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def _wait_until_healthy(server: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        status = server.process.poll()
        if status is not None:
            raise ServerError(
                f"{server.name} ended with {status} at its start:\n{server.log_tail()}"
            )
        if _is_healthy(server):
            return
        time.sleep(POLL_S)
    raise ServerError(f"{server.name} is not healthy in time:\n{server.log_tail()}")


def _is_healthy(server: Server) -> bool:
    try:
        with urllib.request.urlopen(f"{server.base_url}/health", timeout=5) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError):
        return False


def _end(process: ChildProcess) -> None:
    """End the process, and the group it leads if need be."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
