"""Where compiled kernels are kept, and what is logged of them while a model is loaded."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_parallm.kernels.compiler import KernelCompiler
from mlx_parallm.kernels.device_precompiler import CUDA_TYPES, device_precompiler
from mlx_parallm.kernels.precompiled import Precompiler
from mlx_parallm.kernels.store import KernelStore
from mlx_parallm.worker.device.kernels import compiler_report, kernels_kept_in


def no_launch(**call: object) -> list[mx.array]:
    raise AssertionError(f"{call['name']} was launched")


def test_a_folder_gets_the_kernels_and_waiting_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    is_reported = threading.Event()
    lines: list[tuple[str, float]] = []

    def compile_source(source: str, name: str) -> bytes:
        assert is_reported.wait(600)  # time limit: the thread of a failed test ends
        return source.encode()

    def on_progress(text: str, share: float) -> None:
        lines.append((text, share))
        is_reported.set()

    compiler = KernelCompiler(compile_source, "13.5 sm_90a", KernelStore(tmp_path / "users"))
    precompiler = Precompiler(compiler, no_launch, CUDA_TYPES)
    with kernels_kept_in(precompiler, str(tmp_path / "mine"), on_progress):
        compiler.begin("first", "a")
        compiler.begin("second", "b")
        compiler.code("first", "a")
        compiler.code("second", "b")
    assert lines[0] == ("Compiling 2 GPU kernels", 0.0)
    assert {text for text, _ in lines} == {"Compiling 2 GPU kernels"}
    assert KernelStore(tmp_path / "mine").count() == 2
    assert not (tmp_path / "users").exists()
    assert f"2 compiled, 0 read from {tmp_path / 'mine'}" in caplog.text


def test_without_a_gpu_there_is_nothing_to_compile_or_to_tell(tmp_path: Path) -> None:
    assert device_precompiler() is None
    assert compiler_report() is None
    with kernels_kept_in(None, str(tmp_path / "mine"), lambda text, share: None):
        pass
    assert not (tmp_path / "mine").exists()
