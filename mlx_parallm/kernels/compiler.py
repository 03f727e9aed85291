"""Compiles kernels on several threads, and caches their machine code on disk."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from mlx_parallm.kernels.store import KernelStore
from mlx_parallm.machine import num_processors

logger = logging.getLogger(__name__)

#: ``Compile`` turns a source, which has a name, into machine code. Several threads call it at once.
Compile = Callable[[str, str], bytes]
#: ``Watch`` gets how many kernels are compiled, and how many were requested together with them.
Watch = Callable[[int, int], None]

# MAX_THREADS: a compilation takes some 150 MB of memory.
MAX_THREADS = 16
#: ``REPORT_S``: seconds between two reports of a waiting thread.
REPORT_S = 0.1


class CompilationError(RuntimeError):
    """A kernel's source could not be compiled."""


@dataclass(slots=True)
class CompilerCounts:
    """Counts of what a compiler did so far.

    Attributes:
        compiled: kernels that were compiled.
        kept: kernels that were read from disk instead.
        waited_s: seconds that callers waited for kernels, in total.
    """

    compiled: int = 0
    kept: int = 0
    waited_s: float = 0.0


class KernelCompiler:
    """Compiles each source once, in the background from ``begin`` on. It is thread-safe."""

    def __init__(
        self, compile_source: Compile, identity: str, store: KernelStore, threads: int | None = None
    ) -> None:
        """Compile by ``compile_source``; with one ``identity``, equal sources give equal code.

        The first words of the identity are for people: they name the compiler and the device.
        """
        self.identity = identity
        self.counts = CompilerCounts()
        self._compile = compile_source
        self._store = store
        self._threads = threads or min(num_processors(), MAX_THREADS)
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._futures: dict[str, Future[bytes]] = {}
        self._watch: Watch | None = None
        # Kernels requested since all earlier ones were done, and how many of these are done.
        self._batch: int = 0
        self._done = 0

    @property
    def store(self) -> KernelStore:
        """Return the store of the machine code."""
        return self._store

    def keep_in(self, store: KernelStore) -> None:
        """Use another store from now on."""
        self._store = store

    def watch(self, watch: Watch | None) -> None:
        """Call ``watch`` from threads that wait for a kernel; None: call nothing."""
        self._watch = watch

    def begin(self, source: str, name: str) -> Future[bytes]:
        """Start to compile a source in the background, unless it was started before."""
        key = self._key(source, name)
        with self._lock:
            future = self._futures.get(key)
            if future is None:
                future = self._futures[key] = self._submit(key, source, name)
        return future

    def code(self, source: str, name: str) -> bytes:
        """Return a source's machine code; wait until it is compiled.

        Raises:
            CompilationError: the source is wrong, or not for this device.
        """
        future = self.begin(source, name)
        begin_s, has_reported = time.monotonic(), False
        while not wait([future], timeout=REPORT_S).done:
            self._report()
            has_reported = True
        if has_reported:
            self._report()
        self.counts.waited_s += time.monotonic() - begin_s
        return future.result()

    def _submit(self, key: str, source: str, name: str) -> Future[bytes]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="kernels")
        if self._done == self._batch:
            self._batch = self._done = 0
        self._batch += 1
        return self._pool.submit(self._make, key, source, name)

    def _make(self, key: str, source: str, name: str) -> bytes:
        try:
            code = self._store.get(key)
            is_kept = code is not None
            if code is None:
                code = self._compile(source, name)
                self._store.put(key, code)
        finally:
            with self._lock:
                self._done += 1
        with self._lock:
            self.counts.kept += is_kept
            self.counts.compiled += not is_kept
        return code

    def _report(self) -> None:
        if self._watch is not None:
            with self._lock:
                done, batch = self._done, self._batch
            self._watch(done, batch)

    def _key(self, source: str, name: str) -> str:
        parts = (self.identity, name, source)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()
