"""A Mac as a process sees it: Metal is there, and its memory has the size of a Mac's.

Arrays stay on the CPU. Kernels are the texts for Metal, compiled as C++ over the shim, unless the
Mac is one that rejects them.
"""

from __future__ import annotations

import importlib
import json
import platform
import re
import sys
import sysconfig
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
import pytest

from mlx_parallm.kernels.kernel import KernelText
from mlx_parallm.kernels.language import MetalLanguage
from mlx_parallm.worker.attention import check
from tests.kernels.shim_language import MetalShim

GIB = 1 << 30
#: ``WORKING_SETS``: the GiB that Metal recommends at most, by the GiB of memory.
WORKING_SETS = {8: 5.33, 16: 10.67, 32: 21.33, 64: 48.0, 128: 96.0}
#: ``PAGE``: the bytes of a page of memory.
PAGE = 16384
#: ``ALL``: matches the name of every kernel.
ALL = ""
#: ``REJECTION``: MLX's error for a kernel that Metal's compiler rejects.
REJECTION = (
    "[metal::Device] Unable to build metal library from source\n"
    "program_source:3:1: error: unknown type name 'threadgroups'"
)
#: ``IMPORTED``: modules that ask for the device or the system when they are imported.
IMPORTED = ("mlx_lm.generate", "mlx_lm.models.gated_delta", "uvicorn", "uvloop", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeMac:
    """A Mac, and what is wrong with its kernels.

    Attributes:
        memory_gb: its memory in GiB, a key of ``WORKING_SETS``.
        held_gb: what all programs hold of it, in GiB.
        rejects: a pattern of the kernels that its compiler rejects, which is searched for in their
            name and source; None for none.
        wrong: a pattern of the names of kernels that do nothing, and return zeros; None for none.
        broken_by: while this file exists, every launch fails as a rejected kernel does.
        outputs: what commands such as ``sysctl`` print, by their names.
        limits: the last arguments of MLX's functions that set limits, by their names.
    """

    memory_gb: int = 16
    held_gb: float = 4.0
    rejects: str | None = None
    wrong: str | None = None
    broken_by: str | None = None
    outputs: Mapping[str, str] = field(default_factory=dict[str, str])
    limits: dict[str, int] = field(default_factory=dict[str, int], compare=False)

    @property
    def working_set_bytes(self) -> int:
        """Return the bytes that Metal recommends at most."""
        return int(WORKING_SETS[self.memory_gb] * GIB)

    def device_info(self) -> dict[str, str | int]:
        """Return what MLX says of the GPU."""
        return {
            "device_name": "Apple M2",
            "architecture": "applegpu_g14g",
            "max_buffer_length": self.working_set_bytes * 3 // 4,
            "max_recommended_working_set_size": self.working_set_bytes,
            "memory_size": self.memory_gb * GIB,
            "resource_limit": 499000,
        }

    def vm_stat(self) -> str:
        """Return what the command of this name prints: half of what is not held are free pages."""
        held, free = (int(size * GIB) // PAGE for size in (self.held_gb, self.unused_gb / 2))
        counts = {
            "Pages free": free,
            "Pages active": held // 2,
            "Pages inactive": held // 4 + free,
            "Pages speculative": 946,
            "Pages throttled": 0,
            "Pages wired down": held // 4,
            "Pages purgeable": 0,
            '"Translation faults"': 3191714332,
            "Pages copy-on-write": 107374182,
            "File-backed pages": free,
            "Anonymous pages": held // 2,
            "Pages stored in compressor": held // 2,
            "Pages occupied by compressor": held // 4,
            "Swapouts": 125820,
        }
        lines = [f"{name + ':':<30}{count:>12}." for name, count in counts.items()]
        return f"Mach Virtual Memory Statistics: (page size of {PAGE} bytes)\n" + "\n".join(lines)

    @property
    def unused_gb(self) -> float:
        """Return the GiB that no program holds."""
        return self.memory_gb - self.held_gb

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the Mac with these attributes."""
        return cls(**json.loads(text))


class _Gpu:
    """The default device: it is no device that MLX's CPU build could compute on."""

    type = mx.DeviceType.gpu

    def __repr__(self) -> str:
        return "Device(gpu, 0)"


class _Kernels:
    """``mx.fast.metal_kernel`` of a fake Mac."""

    def __init__(self, mac: FakeMac, shim: MetalShim) -> None:
        self._mac = mac
        self._shim = shim

    def __call__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
    ) -> Callable[..., list[mx.array]]:
        """Return a kernel, which MLX compiles when it is launched first."""
        strided = not ensure_row_contiguous
        text = KernelText(name, tuple(input_names), tuple(output_names), source, header, strided)
        made = self._shim.make(text)

        def launch(**options: Any) -> list[mx.array]:
            if self._is_rejected(f"{name}\n{source}"):
                raise RuntimeError(REJECTION)
            if _matches(self._mac.wrong, name):
                outputs = zip(options["output_shapes"], options["output_dtypes"], strict=True)
                return [mx.zeros(shape, dtype) for shape, dtype in outputs]
            return made(**options)

        return launch

    def _is_rejected(self, text: str) -> bool:
        broken_by = self._mac.broken_by
        is_broken = broken_by is not None and Path(broken_by).exists()
        return is_broken or _matches(self._mac.rejects, text)


def _matches(pattern: str | None, text: str) -> bool:
    return pattern is not None and re.search(pattern, text) is not None


def pretend(mac: FakeMac, patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let this process see a Mac until ``patch`` is undone; commands are written to ``folder``."""
    for module in IMPORTED:
        importlib.import_module(module)
    # These are read from a file with the system in its name.
    sysconfig.get_config_vars()
    patch.setattr(mx, "default_device", lambda: _Gpu())
    patch.setattr(mx, "device_info", lambda *_: mac.device_info())
    patch.setattr(mx.metal, "is_available", lambda: True)
    shim = MetalShim()
    patch.setattr(mx.fast, "metal_kernel", _Kernels(mac, shim))
    patch.setattr(MetalLanguage, "bound", lambda _, array: shim.bound(array))
    # The shim takes longer for a launch than a GPU does for a thousand.
    patch.setattr(check, "ORDER_ROWS", 1)
    patch.setattr(check, "ORDER_STEPS", 12)
    # The shim runs a kernel at once, which a function that MLX traces may not.
    patch.setattr(mx, "compile", lambda function, **_: function)
    for name in ("set_cache_limit", "set_wired_limit", "set_memory_limit"):
        patch.setattr(mx, name, _recorder(mac, name))
    patch.setattr(sys, "platform", "darwin")
    patch.setattr(platform, "machine", lambda: "arm64")
    patch.setattr(platform, "platform", lambda *_: "macOS-15.5-arm64-arm-64bit")
    patch.setattr(platform, "mac_ver", lambda *_: ("15.5", ("", "", ""), "arm64"))
    # urllib asks macOS for proxies.
    proxies: Any = types.ModuleType("_scproxy")
    proxies._get_proxies = proxies._get_proxy_settings = dict
    patch.setitem(sys.modules, "_scproxy", proxies)
    for name, output in ({"vm_stat": mac.vm_stat()} | dict(mac.outputs)).items():
        _write_command(folder / name, output)
    patch.setenv("PATH", str(folder), prepend=":")


def _recorder(mac: FakeMac, name: str) -> Callable[[int], int]:
    def record(limit: int) -> int:
        before = mac.limits.get(name, 0)
        mac.limits[name] = limit
        return before

    return record


def _write_command(file: Path, output: str) -> None:
    """Write a command that prints something, however it is called."""
    file.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\n")
    file.chmod(0o700)
