"""A process that has imported everything and computed nothing, and forks others.

The imports of a server take three seconds of CPU time; a fork takes some milliseconds. What is
forked behaves as a process of its own: it has the arguments, the environment, the descriptors, the
signals and the parent that ``subprocess`` would give it, and Python ends it in the same way.

The parent forks twice, and the process between ends at once. So the new process is an orphan, and
Linux makes it a child of the process that asked for it, which is a subreaper meanwhile
(PR_SET_CHILD_SUBREAPER in prctl(2)). Each forked process has a forking parent of its own, which is
forked before it does anything, for the processes that it starts itself.

Threads do not outlive a fork, so the parent has one; see ``main``. Only Linux forks: macOS does
not allow it without an ``exec`` after its frameworks are loaded. What a library reads from the
environment when it is imported it reads in the parent: see ``ForkingParent.can_start``.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlx_parallm.machine import visible_devices
from mlx_parallm.peers.child_process import ChildProcess
from mlx_parallm.peers.launch import ENGINE, HTTP
from mlx_parallm.process_setup.device_process import prepare_device_process

ROOT = Path(__file__).resolve().parent.parent
#: Modules that servers and their processes run or import late.
MODULES = (
    "mlx_parallm.cli.serve_start",
    "mlx_parallm.cli.serve",
    "mlx_parallm.serving.build",
    ENGINE,
    HTTP,
    "mlx_lm.models.qwen3",
    "transformers.models.qwen3",
    "uvicorn.lifespan.on",
)
#: Variables that nothing reads when it is imported, besides those that begin with ``OWN``. Those of
#: threads are read by no library that has ``OPENBLAS_NUM_THREADS``, which the parent has.
READ_LATE = frozenset(
    {
        "MLX_RANK",
        "MLX_HOSTFILE",
        "OMP_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS",
        # Folders are searched where the parent searches them.
        "PYTHONPATH",
        # An import sets it.
        "TRANSFORMERS_NO_ADVISORY_WARNINGS",
        "PYTEST_CURRENT_TEST",
    }
)
OWN = "MLX_PARALLM_"
#: ROOM: an argument in whose place ps(1) and /proc show those of what is forked.
ROOM = "." * 4000
#: MAX_REQUEST, MAX_DESCRIPTORS: the largest request, in bytes, and the descriptors with it.
MAX_REQUEST, MAX_DESCRIPTORS = 1 << 18, 64
#: SUBREAPER: PR_SET_CHILD_SUBREAPER of prctl(2).
SUBREAPER = 36
#: EXECUTE: how ``subprocess`` starts a process, with the arguments of SIGNATURE.
POPEN: Any = subprocess.Popen
EXECUTE = POPEN._execute_child
SIGNATURE = inspect.signature(EXECUTE)
#: PIPES: the arguments of ``subprocess`` that are descriptors.
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
#: ACTIONS: what a new Python does on signals to a process group, which the parent blocks.
ACTIONS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}


@dataclass(frozen=True)
class _Request:
    """A process to be.

    Attributes:
        command: see ``ForkingParent.fork``, as for the others.
        environment: its variables.
        numbers: its descriptors.
        mask: the signals that it blocks.
        copies: copies of its descriptors, in this order.
    """

    command: list[str]
    environment: dict[str, str]
    numbers: list[int]
    mask: list[int]
    copies: Sequence[int] = ()


class ForkingParent:
    """The side that asks."""

    def __init__(
        self,
        requests: socket.socket,
        environment: Mapping[str, str],
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        """Ask over this socket a parent that began with these variables."""
        self._requests = requests
        self._process = process
        self._environment = _read_early(environment)
        self._lock = threading.Lock()

    @classmethod
    def start(cls, environment: Mapping[str, str]) -> ForkingParent:
        """Return one that has been started, and ends with this process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # No ``ChildProcess``: it would have a thread. It ends when the socket is closed.
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.forking_parent", str(theirs.fileno()), ROOM],
                cwd=ROOT,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        return cls(ours, environment, process)

    def close(self) -> None:
        """End it; what it has forked goes on."""
        self._requests.close()
        if self._process is not None:
            self._process.wait()

    def can_start(self, command: Sequence[str], options: Mapping[str, Any]) -> bool:
        """True if a process of ``subprocess.Popen(command, **options)`` may be forked.

        It runs a module, in the parent's folder, and libraries read from the environment what they
        read in the parent.
        """
        return (
            _module_of(command) != []
            and options.get("preexec_fn") is None
            and Path(options.get("cwd") or os.getcwd()) == ROOT
            and _read_early(_environment_of(options)) == self._environment
        )

    def fork(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        descriptors: Mapping[int, int],
    ) -> int:
        """Return the process id of a new child of this process.

        Args:
            command: Python, its options, and a module with its arguments.
            environment: its variables.
            descriptors: those that it has, with those of this process that they are copies of.
        """
        mask = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
        request = _Request(list(command), dict(environment), list(descriptors), mask)
        message = json.dumps(asdict(request)).encode()
        with self._lock:
            _prctl(SUBREAPER, 1)
            try:
                socket.send_fds(self._requests, [message], list(descriptors.values()))
                answer = self._requests.recv(MAX_REQUEST)
            finally:
                _prctl(SUBREAPER, 0)
        assert answer, "the forking parent has ended"
        return int(answer)


class ForkedProcess(ChildProcess):
    """A ``ChildProcess`` that is forked if that makes no difference to it."""

    def _execute_child(self, *arguments: Any) -> None:
        """Start the process: ``Popen`` calls this."""
        _execute(shared_parent(), self, arguments)


@functools.cache
def shared_parent() -> ForkingParent | None:
    """Return the parent of all that this process has forked; None where it must not fork.

    A library of NVIDIA's does not outlive a fork either, once it is initialised.
    """
    has_one_thread = os.environ.get("OPENBLAS_NUM_THREADS") == "1"
    if sys.platform != "linux" or not has_one_thread or visible_devices(os.environ):
        return None
    return ForkingParent.start(os.environ)


@contextmanager
def forked_engines() -> Iterator[None]:
    """Let the engine processes that this process starts in the block be forked."""
    before = POPEN._execute_child

    def execute(process: Any, command: Any, *arguments: Any) -> None:
        is_engine = isinstance(command, list) and command[1:4] == ["-P", "-m", ENGINE]
        parent = shared_parent() if is_engine else None
        _execute(parent, process, [command, *arguments])

    POPEN._execute_child = execute
    try:
        yield
    finally:
        POPEN._execute_child = before


def _execute(parent: ForkingParent | None, process: Any, arguments: Sequence[Any]) -> None:
    """Start a process as ``subprocess`` does with these arguments, but by a fork if it may."""
    named = SIGNATURE.bind(process, *arguments).arguments
    if parent is None or not parent.can_start(named["args"], named):
        EXECUTE(process, *arguments)
        return
    ends = [named[name] for name in ("p2cread", "c2pwrite", "errwrite")]
    descriptors = {number: number for number in named["pass_fds"]}
    descriptors |= {place: place if end == -1 else end for place, end in enumerate(ends)}
    try:
        process.pid = parent.fork(named["args"], _environment_of(named), descriptors)
        process._child_created = True
    finally:
        process._close_pipe_fds(*(named[name] for name in PIPES))


def main(requests: socket.socket) -> None:
    """Be a forking parent until nothing asks any more, or be a process that it has forked.

    That process runs from here and not from further down, so that Python ends it as any other.
    """
    environment = dict(os.environ)
    prepare_device_process()
    for module in MODULES:
        importlib.import_module(module)
    app = importlib.import_module("mlx_parallm.api.app")
    app.routes_of(app.SLICES + app.STORING_SLICES)
    gc.collect()
    gc.freeze()
    signal.pthread_sigmask(signal.SIG_BLOCK, ACTIONS)
    while True:
        request = _answer(requests)
        requests.close()
        _take_descriptors(request)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            break
        ours.close()
        requests = theirs
        _drop_descriptors(requests.fileno())
    theirs.close()
    _take_over(request)
    _fork_children(ForkingParent(ours, environment))
    module, *arguments = _module_of(request.command)
    sys.argv = ["-m", *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _answer(requests: socket.socket) -> _Request:
    """Fork what is asked for; return in the forked processes only."""
    while True:
        message, copies, *_ = socket.recv_fds(requests, MAX_REQUEST, MAX_DESCRIPTORS)
        if not message:
            os._exit(0)
        num_threads = len(os.listdir("/proc/self/task"))
        assert num_threads == 1, f"a process with {num_threads} threads cannot be forked"
        pid = _fork_orphan()
        if not pid:
            return _Request(**{**json.loads(message), "copies": copies})
        for copy in copies:
            os.close(copy)
        requests.send(str(pid).encode())


def _fork_orphan() -> int:
    """Return the id of a forked process whose parent has ended; 0 in it."""
    read_end, write_end = os.pipe()
    between = os.fork()
    if not between:
        own = os.getpid()
        pid = os.fork()
        if not pid:
            # It looks at its parent as soon as it runs.
            while os.getppid() == own:
                os.sched_yield()
            return 0
        os.write(write_end, str(pid).encode())
        os._exit(0)
    os.waitpid(between, 0)
    pid = int(os.read(read_end, 32))
    os.close(read_end)
    os.close(write_end)
    return pid


def _take_descriptors(request: _Request) -> None:
    """Give this process the descriptors of a request, and no others."""
    free = max(request.numbers) + 1
    copies = [fcntl.fcntl(copy, fcntl.F_DUPFD_CLOEXEC, free) for copy in request.copies]
    _close_all_but(copies)
    for number, copy in zip(request.numbers, copies, strict=True):
        os.dup2(copy, number)
        os.close(copy)


def _drop_descriptors(kept: int) -> None:
    """Close what belongs to the process that this one forks for, but where both log."""
    _close_all_but([2, kept])
    for number in (0, 1):
        assert os.open(os.devnull, os.O_RDWR) == number


def _close_all_but(kept: Collection[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            # That of the folder is closed already.
            with suppress(OSError):
                os.close(int(name))


def _take_over(request: _Request) -> None:
    """Be the process of a request in all but its descriptors."""
    os.environ.clear()
    os.environ.update(request.environment)
    for number, action in ACTIONS.items():
        signal.signal(number, action)
    _show(request.command)
    # Its numbers would be those of every other process of this parent.
    importlib.import_module("mlx.core").random.seed(time.time_ns() ^ os.getpid())
    # What is run has been imported here.
    warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.mask)


def _show(command: Sequence[str]) -> None:
    """Let ps(1) and /proc show a command as this process's."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    # ``arg_start`` and ``arg_end`` of proc(5), whose first field here is the third.
    start, end = int(fields[45]), int(fields[46])
    shown = b"".join(os.fsencode(argument) + b"\0" for argument in command)
    ctypes.memmove(start, shown[: end - start - 1].ljust(end - start, b"\0"), end - start)


def _fork_children(parent: ForkingParent) -> None:
    """Let the processes that this one starts be forked."""

    POPEN._execute_child = lambda process, *arguments: _execute(parent, process, arguments)


def _module_of(command: Sequence[str]) -> Sequence[str]:
    """Return the module that a command runs in this Python, and its arguments; empty if none."""
    for start in ([sys.executable, "-m"], [sys.executable, "-P", "-m"]):
        if isinstance(command, list) and command[: len(start)] == start:
            return command[len(start) :]
    return []


def _environment_of(options: Mapping[str, Any]) -> Mapping[str, str]:
    environment = options.get("env")
    return os.environ if environment is None else environment


def _read_early(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a library may read when it is imported."""
    return {
        name: value
        for name, value in environment.items()
        if name not in READ_LATE and not name.startswith(OWN)
    }


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
