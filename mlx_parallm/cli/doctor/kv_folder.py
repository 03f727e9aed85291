"""The folder of ``--kv-disk``: whether it can be used, what is in it, and how fast it is read."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from mlx_parallm.config import CacheConfig
from mlx_parallm.generation.kv_cache.disk.folder import check_kv_folder
from mlx_parallm.storage.disk import sync
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.units import readable_bytes

# PROBE_BYTES: size of the file that is written and read. A file of blocks has 8 MiB.
PROBE_BYTES = 32 << 20
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KVFolderReport:
    """The folder of ``--kv-disk``.

    Attributes:
        path: the folder, which is created like by a server.
        refused: why a server would not start; None if it would.
        off: why a server would keep nothing in it; None if it would keep blocks.
        limit_bytes: most bytes of the files in it.
        used_bytes: bytes of the files in it, those of other models and versions too.
        free_bytes: free bytes of its file system.
        read_gb_per_s: measured with a small file; the system's cache of files is passed by where
            the system allows that. None if it was not measured.
    """

    path: str
    refused: str | None = None
    off: str | None = None
    limit_bytes: int = 0
    used_bytes: int = 0
    free_bytes: int = 0
    read_gb_per_s: float | None = None


def kv_folder_report(cache: CacheConfig) -> KVFolderReport | None:
    """Return the report on the folder of the settings; None if they have none."""
    folder = cache.kv_disk
    if folder is None:
        return None
    report = KVFolderReport(path=str(folder), limit_bytes=cache.kv_disk_bytes)
    try:
        check_kv_folder(folder)
    except ConfigError as problem:
        return replace(report, refused=str(problem))
    try:
        report = replace(
            report, used_bytes=_used_bytes(folder), free_bytes=shutil.disk_usage(folder).free
        )
        return replace(report, read_gb_per_s=round(PROBE_BYTES / _read_s(folder) / 1e9, 2))
    except OSError as problem:
        return replace(report, off=problem.strerror or str(problem))


def kv_folder_advice(report: KVFolderReport | None) -> list[str]:
    """Return advice about the folder; none if it works."""
    if report is None or report.refused is not None:
        return []
    if report.off is not None:
        return [f"--kv-disk keeps nothing: {report.off} ({report.path})."]
    room = report.used_bytes + report.free_bytes
    if room < report.limit_bytes:
        return [
            f"The file system of --kv-disk has room for {readable_bytes(room)}, and "
            f"--kv-disk-bytes is {readable_bytes(report.limit_bytes)}."
        ]
    return []


def kv_folder_text(report: KVFolderReport) -> str:
    """Return the report as a line."""
    if report.refused is not None:
        return report.refused
    sizes = f"{readable_bytes(report.used_bytes)} of {readable_bytes(report.limit_bytes)} used"
    state = f"off: {report.off}" if report.off else f"reads {report.read_gb_per_s:.2f} GB/s"
    return f"{report.path}: {sizes}, {readable_bytes(report.free_bytes)} free, {state}"


def _used_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder; they may be removed meanwhile."""
    used = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                used += os.lstat(os.path.join(place, name)).st_size
            except FileNotFoundError:
                continue
    return used


def _read_s(folder: Path) -> float:
    """Return the seconds that reading a new file of ``PROBE_BYTES`` takes."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        descriptor = file.fileno()
        _pass_by_cache(descriptor)
        for _ in range(PROBE_BYTES // CHUNK_BYTES):
            file.write(os.urandom(CHUNK_BYTES))
        sync(descriptor)
        _pass_by_cache(descriptor)
        begin_s = time.perf_counter()
        for number in range(PROBE_BYTES // CHUNK_BYTES):
            os.pread(descriptor, CHUNK_BYTES, number * CHUNK_BYTES)
        return time.perf_counter() - begin_s


def _pass_by_cache(descriptor: int) -> None:
    """Have the system keep nothing of a file in memory, where it can be asked to."""
    no_cache: int | None = getattr(fcntl, "F_NOCACHE", None)
    if no_cache is not None:
        fcntl.fcntl(descriptor, no_cache, 1)
    elif hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
