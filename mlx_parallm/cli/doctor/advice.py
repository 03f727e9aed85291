"""Advice that would make an installation faster or safer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_parallm.cli.doctor.system import MacReport
from mlx_parallm.units import readable_bytes
from mlx_parallm.worker.device.properties import DeviceReport
from mlx_parallm.worker.timing.tunings import TuningTime

if TYPE_CHECKING:
    from mlx_parallm.cli.doctor.speed import SpeedReport

GIB = 1 << 30
# MUCH_SWAPPED: bytes of swapped memory from which a Mac has too little of it.
MUCH_SWAPPED = GIB
# MIN_GAIN: times that differ by a smaller factor are alike.
MIN_GAIN = 1.1
REPORT = "please open an issue with the output of `mlx_parallm doctor --json`"


def rejection_advice(rejected: Mapping[str, str]) -> list[str]:
    """Return advice for kernels that are not used; ``rejected`` is as in ``Diagnosis``."""
    if not rejected:
        return []
    return [
        f"Kernels of this device are rejected ({', '.join(rejected)}). A server runs without them, "
        f"slower: {REPORT}."
    ]


def mac_advice(mac: MacReport | None) -> list[str]:
    """Return advice about a Mac; none for other machines."""
    advice: list[str] = []
    if mac is not None and mac.is_translated:
        advice.append(
            "This Python is for Intel and runs under Rosetta; install one for Apple Silicon."
        )
    if mac is not None and (mac.swap_used_bytes or 0) >= MUCH_SWAPPED:
        advice.append(
            f"macOS has swapped out {readable_bytes(mac.swap_used_bytes or 0)}: end other "
            "programs, or serve less (see docs/mac.md)."
        )
    return advice


def speed_advice(tunings: Sequence[TuningTime], speed: SpeedReport | None) -> list[str]:
    """Return advice if the model failed, or something else was faster than what models use."""
    advice: list[str] = []
    if speed is not None and speed.problem is not None:
        advice.append(f"The demonstration model fails ({speed.problem}): {REPORT}.")
    shipped = next((each for each in tunings if each.is_shipped and each.problem is None), None)
    best = fastest(tunings)
    if shipped and best and shipped.launch_us > MIN_GAIN * best.launch_us:
        advice.append(
            f"Attention takes {shipped.launch_us:.0f} us with the tuning in use ({shipped.name}) "
            f"and {best.launch_us:.0f} us with {best.name}: {REPORT}."
        )
    if speed is not None and speed.kernels is not None and speed.stock is not None:
        for rows, own, stock in (
            ("1 row", speed.kernels.one_row, speed.stock.one_row),
            ("16 rows", speed.kernels.many_rows, speed.stock.many_rows),
        ):
            if stock > MIN_GAIN * own:
                advice.append(
                    f"With {rows}, kernels generate {own:.0f} tokens/s and stock operations "
                    f"{stock:.0f}: {REPORT}."
                )
    return advice


def fastest(tunings: Sequence[TuningTime]) -> TuningTime | None:
    """Return the fastest tuning; None if none was timed."""
    timed = [each for each in tunings if each.problem is None]
    return min(timed, key=lambda each: each.launch_us, default=None)


def device_advice(device: DeviceReport, system: str) -> list[str]:
    """Return advice about the device and its memory.

    Args:
        device: the device in use.
        system: as in ``sys.platform``.
    """
    advice: list[str] = []
    if device.has_slow_blas and device.backend == "cpu":
        advice.append(
            f"MLX's CPU build uses a slow BLAS ({device.matmul_gflops:.0f} GFLOP/s). Install "
            "mlx-parallm[cpu], which brings OpenBLAS; a warning says if it cannot be loaded. "
            "Where there is no wheel of it, preload a BLAS of the system (LD_PRELOAD)."
        )
    if system == "darwin" and device.backend == "cpu":
        advice.append("MLX runs on the CPU of this Mac; Metal is not available to this process.")
    if system == "linux" and device.backend == "cpu" and Path("/dev/nvidia0").exists():
        advice.append("There is an NVIDIA GPU: install the extra cuda12 or cuda13 to use it.")
    free = device.memory_free_bytes
    if free is not None and free < 2 * GIB:
        advice.append(f"Only {free / GIB:.1f} GiB of memory is free; large models will not load.")
    return advice
