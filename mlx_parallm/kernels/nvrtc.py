"""NVIDIA's runtime compiler (NVRTC) as loaded by MLX, called through ctypes.

MLX compiles a custom kernel at its first call, under a lock, again in every process, with headers
that take 1.5 seconds to read. Calls through ctypes let other threads run, and the texts need only
two headers; the machine code is the same (``docs/decisions/024-kernels-on-disk.md``).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_parallm.kernels.compiler import CompilationError

#: ``HEADERS`` that the texts need; MLX includes more.
HEADERS = ("cuda_bf16.h", "cuda_fp16.h")
#: ``HEADER_FILES``: files that the machine code depends on.
HEADER_FILES = ("cuda_bf16.h", "cuda_bf16.hpp", "cuda_fp16.h", "cuda_fp16.hpp")
# FLAGS are those that MLX passes.
FLAGS = ("--device-as-default-execution-space",)
LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12")
# PACKAGE_INCLUDES: folders of the packages of CUDA 13 and CUDA 12.
PACKAGE_INCLUDES = ("nvidia/cu13/include", "nvidia/cuda_runtime/include")
CUDA_HOMES = ("CUDA_HOME", "CUDA_PATH")
DEFAULT_CUDA_HOME = "/usr/local/cuda"


@dataclass(frozen=True, slots=True)
class Nvrtc:
    """The library, the device's architecture, and the folders of headers."""

    library: ctypes.CDLL
    architecture: str
    includes: tuple[Path, ...]

    @property
    def version(self) -> str:
        """Return the version of the library, such as ``13.5``."""
        numbers = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", *map(ctypes.byref, numbers))
        return ".".join(str(number.value) for number in numbers)

    @property
    def identity(self) -> str:
        """Return everything besides a source that its machine code depends on."""
        digest = hashlib.sha256()
        for name in HEADER_FILES:
            for folder in self.includes:
                if (folder / name).is_file():
                    digest.update((folder / name).read_bytes())
                    break
        return " ".join((self.version, self.architecture, *self._flags, digest.hexdigest()))

    def compile(self, source: str, name: str) -> bytes:
        """Return the machine code (cubin) of a source.

        Raises:
            CompilationError: the compiler refuses; the message is its log.
        """
        program = ctypes.c_void_p()
        text = "".join(f"#include <{header}>\n" for header in HEADERS) + source
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            text.encode(),
            f"{name}.cu".encode(),
            0,
            None,
            None,
        )
        try:
            return self._code(program, name)
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    @property
    def _flags(self) -> tuple[str, ...]:
        return (*FLAGS, f"--gpu-architecture={self.architecture}")

    def _code(self, program: ctypes.c_void_p, name: str) -> bytes:
        flags = [*self._flags, *(f"--include-path={folder}" for folder in self.includes)]
        arguments = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        if self.library.nvrtcCompileProgram(program, len(flags), arguments):
            log = self._read(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog")
            raise CompilationError(f"{name}: {log.rstrip(bytes(1)).decode(errors='replace')}")
        return self._read(program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN")

    def _read(self, program: ctypes.c_void_p, ask_size: str, ask: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(ask_size, program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(ask, program, buffer)
        return buffer.raw

    def _call(self, function: str, *args: object) -> None:
        status = getattr(self.library, function)(*args)
        if status:
            raise CompilationError(f"{function} failed with status {status}")


def loaded_nvrtc() -> Nvrtc | None:
    """Return the compiler that MLX has loaded, for the default device; None without one."""
    library, architecture = _loaded_library(), device_architecture(dict(mx.device_info()))
    includes = include_folders(Path(str(mx.__file__)).parent, sys.path, os.environ)
    if library is None or architecture is None or not includes:
        return None
    return Nvrtc(library, architecture, includes)


def device_architecture(info: Mapping[str, object]) -> str | None:
    """Return NVRTC's name of a device, with its specific instructions, as MLX compiles; or None."""
    name = str(info.get("architecture", ""))
    digits = name.removeprefix("sm_")
    if not name.startswith("sm_") or not digits.isdigit():
        return None
    return name + ("a" if int(digits) >= 90 else "")


def include_folders(
    mlx: Path, search_path: Sequence[str], environment: Mapping[str, str]
) -> tuple[Path, ...]:
    """Return the folders of CUDA's headers and those they include; empty if they are missing."""
    for folder in _cuda_folders(mlx, search_path, environment):
        if all((folder / name).is_file() for name in HEADERS):
            bundled = (mlx / "include", mlx / "include" / "cccl")
            return (*(path for path in bundled if path.is_dir()), folder)
    return ()


def _cuda_folders(
    mlx: Path, search_path: Sequence[str], environment: Mapping[str, str]
) -> Iterator[Path]:
    """Yield folders that may have the headers, in MLX's order."""
    homes = [environment[name] for name in CUDA_HOMES if environment.get(name)]
    packages = [Path(entry) for entry in search_path if entry]
    yield from (mlx.parent / name for name in PACKAGE_INCLUDES)
    yield from (Path(home) / "include" for home in (*homes, DEFAULT_CUDA_HOME))
    yield from (package / name for package in packages for name in PACKAGE_INCLUDES)


def _loaded_library() -> ctypes.CDLL | None:
    """Return NVRTC if it is loaded; a version other than MLX's would not do."""
    if not hasattr(os, "RTLD_NOLOAD"):
        return None
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        except OSError:
            continue
    return None
