"""A real server in a process of its own, started as a user would."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import IO

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from mlx_parallm.api.http.listener import bind
from mlx_parallm.peers.child_process import ChildProcess
from mlx_parallm.serving.local_ranks import ring_ranks
from tests.forking_parent import ForkedProcess
from tests.listeners import Listener

ROOT = Path(__file__).resolve().parent.parent
#: 24,000 tokens of the embedded model; the default size takes 1 to 3 s of CPU time to fill.
POOL = {"MLX_PARALLM_KV_CACHE_MEMORY_BYTES": "128MiB"}
#: No answer depends on how busy the machine is: see README.md.
PATIENT = {
    "MLX_PARALLM_CLIENT_TIMEOUT": "0",
    "MLX_PARALLM_SSE_KEEP_ALIVE_INTERVAL": "0",
    "MLX_PARALLM_SHUTDOWN_TIMEOUT": "3600",
    "MLX_PARALLM_DISTRIBUTED_JOIN_TIMEOUT": "3600",
}
#: The variable that says how many ranks compute the models of every server of a run of tests.
RANKS = "MLX_PARALLM_TEST_RANKS"
#: The variable that says how many dialled engines every server of a run of tests has.
DIALLED = "MLX_PARALLM_TEST_DIALLED"
#: What mlx_lm sets for its process when it is imported; a user's shell does not have it.
SET_BY_LIBRARIES = frozenset({"TRANSFORMERS_NO_ADVISORY_WARNINGS"})


def user_environment() -> dict[str, str]:
    """Return the environment of this process without what imported libraries set."""
    return {name: value for name, value in os.environ.items() if name not in SET_BY_LIBRARIES}


@cache
def shared_listener() -> Listener:
    """Return the listener whose engines all servers of this process have."""
    return Listener()


def dialled_engines() -> dict[str, str]:
    """Return the variable of the engines that ``DIALLED`` asks for; empty without it."""
    count = int(os.environ.get(DIALLED, "0"))
    return (
        {"MLX_PARALLM_ENGINE": ",".join([str(shared_listener().address)] * count)} if count else {}
    )


def limiting(descriptors: tuple[int, int]) -> Callable[[], None]:
    """Return what sets a child's soft and hard limit of descriptors before it runs."""
    return partial(resource.setrlimit, resource.RLIMIT_NOFILE, descriptors)


class ServerProcess:
    """`python -m mlx_parallm serve FLAGS` on a free port of the loopback interface.

    It ends with this process, however that ends.
    It is handed its socket: tests run beside each other, and a free port that is only named may
    be another server's by then.
    """

    def __init__(
        self,
        *flags: str,
        env: dict[str, str] | None = None,
        num_ranks: int | None = None,
        descriptors: tuple[int, int] | None = None,
        program: Sequence[str] = ("mlx_parallm",),
        is_forked: bool = True,
        listener: socket.socket | None = None,
    ) -> None:
        """Start it.

        Args:
            flags: of the command.
            env: variables of the environment.
            num_ranks: the processes that compute its models together; None for as many as
                ``RANKS`` says, or 1.
            descriptors: the soft and the hard limit that it begins with; None for this process's.
            program: the module that has the command ``serve``, with its arguments.
            listener: a bound socket to serve on, which stays open; None for a new one.
            is_forked: False for a process that imports its modules itself, as a user's does.
        """
        start = ForkedProcess if is_forked else ChildProcess
        self.flags = flags
        size = num_ranks or int(os.environ.get(RANKS, "1"))
        self._log = tempfile.NamedTemporaryFile(mode="w+", suffix=".log")  # noqa: SIM115
        # The tests must not read or write the data folder of the user.
        self._data = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        data_dir = {"MLX_PARALLM_DATA_DIR": str(Path(self._data.name) / "data")}
        with nullcontext(listener) if listener is not None else bind("127.0.0.1", 0) as listener:
            self.port = listener.getsockname()[1]
            self.url = f"http://127.0.0.1:{self.port}"
            fd = listener.fileno()
            own = {**dialled_engines(), **data_dir, **(env or {})}
            environment = {**user_environment(), **POOL, **PATIENT, **own}
            launched = ring_ranks(size, Path(self._data.name)) if size > 1 else [{}]
            #: All ranks; the first serves.
            self.ranks = [
                start(
                    [*program, "serve", "--fd", str(fd), *flags],
                    stdout=self._log,
                    stderr=subprocess.STDOUT,
                    cwd=ROOT,
                    env=environment | variables,
                    pass_fds=[fd],
                    preexec_fn=None if descriptors is None else limiting(descriptors),
                )
                for variables in launched
            ]
            self.process = self.ranks[0]
        # A test that fails does not stop its server. Warnings about it would fail another test.
        weakref.finalize(self, _abandon, self.ranks, self._log, self._data)

    @property
    def log(self) -> str:
        """Everything it has printed."""
        return Path(self._log.name).read_text()

    def wait_until_ready(self) -> None:
        """Return once /health answers 200; fail with the log if the process ends first."""
        transport = httpx2.HTTPTransport(retries=0)
        with httpx2.Client(transport=transport) as client:
            while True:
                try:
                    if client.get(f"{self.url}/health").status_code == 200:
                        return
                except httpx2.TransportError:
                    pass
                try:
                    self.process.wait(0.1)  # time limit: of one question
                except subprocess.TimeoutExpired:
                    continue
                raise AssertionError(f"the server ended:\n{self.log}")

    def metric(self, name: str) -> float:
        """Return the value of a metric with the first labels found, summed over the engines."""
        text = httpx2.get(f"{self.url}/metrics").text
        text = re.sub(r'engine="\d+",?', "", text)
        samples = re.findall(rf"^{re.escape(name)}({{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert samples, f"no metric {name}"
        return sum(float(value) for labels, value in samples if labels == samples[0][0])

    def metric_by_engine(self, name: str) -> list[float]:
        """Return the values of a metric, by the ranks of the engines."""
        families = text_string_to_metric_families(httpx2.get(f"{self.url}/metrics").text)
        samples = {
            int(sample.labels["engine"]): sample.value
            for family in families
            for sample in family.samples
            if sample.name == name
        }
        assert samples, f"no metric {name}"
        return [samples[rank] for rank in range(len(samples))]

    def stop(self, how: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        code = self.process.wait()
        for rank in self.ranks[1:]:
            rank.wait()
        self._log.close()
        self._data.cleanup()
        return code


def _abandon(
    ranks: Sequence[subprocess.Popen[bytes]],
    log: IO[str],
    data: tempfile.TemporaryDirectory[str],
) -> None:
    """Kill what still runs of a server, and remove its files."""
    for rank in ranks:
        rank.kill()
        rank.wait()
    log.close()
    data.cleanup()


@contextmanager
def serving(folders: Mapping[str, Path], *flags: str) -> Iterator[ServerProcess]:
    """Yield a server of models by these names, until the end of the block."""
    names = [f"{folder}={name}" for name, folder in folders.items()]
    models = ["--model", *map(str, folders.values())]
    process = ServerProcess(*models, "--served-model-name", *names, *flags)
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.stop()
