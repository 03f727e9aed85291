"""Everything that machine code depends on is part of the compiler's identity."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mlx_parallm.kernels.nvrtc import HEADER_FILES, Nvrtc


def nvrtc(folder: Path, *, version: str = "13.5", architecture: str = "sm_90a") -> Nvrtc:
    """Return a compiler whose library knows only its version."""

    def tell_version(major: Any, minor: Any) -> int:
        numbers = [int(number) for number in version.split(".")]
        major._obj.value, minor._obj.value = numbers
        return 0

    library: Any = SimpleNamespace(nvrtcVersion=tell_version)
    return Nvrtc(library, architecture, (folder,))


def test_the_identity_tells_version_device_flags_and_headers(tmp_path: Path) -> None:
    for name in HEADER_FILES:
        (tmp_path / name).write_text(name)
    identity = nvrtc(tmp_path).identity
    assert identity == nvrtc(tmp_path).identity
    assert identity.startswith("13.5 sm_90a ")
    others = {
        nvrtc(tmp_path, version="13.6").identity,
        nvrtc(tmp_path, architecture="sm_80").identity,
    }
    for name in HEADER_FILES:
        (tmp_path / name).write_text(f"{name} of another CUDA")
        others.add(nvrtc(tmp_path).identity)
    assert len(others) == 2 + len(HEADER_FILES)
    assert identity not in others
