"""Which BLAS computes MLX's matrix products on the CPU of this process."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

#: ``PRODUCT``: a function of every BLAS, by which MLX multiplies matrices.
PRODUCT = "cblas_sgemm"
#: ``VERSION_FUNCTIONS``: a function that only one BLAS has, and that BLAS's name.
VERSION_FUNCTIONS = {
    "openblas_get_config": "OpenBLAS",
    "mkl_get_version_string": "MKL",
    "bli_info_get_version_str": "BLIS",
}
#: ``MLX_LIBRARIES``: the folders of the libraries that come in the wheels of MLX's builds.
MLX_LIBRARIES = "mlx_*.libs"


@dataclass(frozen=True, slots=True)
class Blas:
    """A library of matrix products.

    Attributes:
        name: its name, and its version if that is known.
        path: its file; None for a part of the system.
        is_slow: True for the reference BLAS that comes with MLX's Linux builds.
    """

    name: str
    path: str | None = None
    is_slow: bool = False

    def __str__(self) -> str:
        """Return name and file."""
        return f"{self.name} ({self.path})" if self.path else self.name


class _SymbolInfo(ctypes.Structure):
    """``Dl_info`` of dladdr(3)."""

    _fields_ = (
        ("file_name", ctypes.c_char_p),
        ("file_base", ctypes.c_void_p),
        ("symbol_name", ctypes.c_char_p),
        ("symbol_address", ctypes.c_void_p),
    )


def has_global_blas() -> bool:
    """True if a BLAS was preloaded: its functions come before those of any library's own."""
    return hasattr(ctypes.CDLL(None), PRODUCT)


def blas_in_use() -> Blas:
    """Return the BLAS that MLX's calls reach, in a process that has imported ``mlx.core``."""
    if sys.platform == "darwin":
        return Blas("Accelerate")
    library = mlx_library()
    if library is None:
        return Blas("unknown")
    # The linker binds a call to the global scope first, then to what MLX's library brings.
    scope = ctypes.CDLL(None if has_global_blas() else str(library))
    if not hasattr(scope, PRODUCT):
        return Blas("unknown")
    path = _file_with(ctypes.cast(getattr(scope, PRODUCT), ctypes.c_void_p))
    if path is None:
        return Blas("unknown")
    loaded = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    names = [name for function, name in VERSION_FUNCTIONS.items() if hasattr(loaded, function)]
    if names == ["OpenBLAS"]:
        return Blas(_openblas_version(loaded), path)
    if names:
        return Blas(names[0], path)
    is_own = Path(path).resolve().parent.match(MLX_LIBRARIES)
    return Blas("reference BLAS" if is_own else "BLAS", path, is_slow=is_own)


def mlx_library() -> Path | None:
    """Return the file of MLX's library; None if MLX is not installed. MLX is not imported."""
    spec = importlib.util.find_spec("mlx")
    folders = (spec and spec.submodule_search_locations) or ()
    libraries = (Path(folder) / "lib" / "libmlx.so" for folder in folders)
    return next((path for path in libraries if path.is_file()), None)


def _file_with(address: ctypes.c_void_p) -> str | None:
    """Return the file that is mapped at an address."""
    info = _SymbolInfo()
    is_known = ctypes.CDLL(None).dladdr(address, ctypes.byref(info))
    return os.fsdecode(info.file_name) if is_known and info.file_name else None


def _openblas_version(library: ctypes.CDLL) -> str:
    """Return for example "OpenBLAS 0.3.34"."""
    library.openblas_get_config.restype = ctypes.c_char_p
    config: bytes = library.openblas_get_config()
    return " ".join(config.decode(errors="replace").split()[:2])
