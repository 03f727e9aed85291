"""Kernels that are compiled apart from MLX, beside a stand-in for how MLX loads and finds them."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm.kernels.compiler import CompilationError, KernelCompiler
from mlx_parallm.kernels.device_precompiler import CUDA_TYPES
from mlx_parallm.kernels.kernel import KernelText, Residency
from mlx_parallm.kernels.language import CudaLanguage
from mlx_parallm.kernels.nvrtc import device_architecture, include_folders
from mlx_parallm.kernels.precompiled import (
    PrecompiledKernel,
    Precompiler,
    module_key,
    program_of,
    string_hash,
)
from mlx_parallm.kernels.store import KernelStore, kernel_folder

TEXT = KernelText(
    name="scale",
    input_names=("x", "slots"),
    output_names=("y",),
    source="y[0] = x[x_shape[1]] * slots[0] + x_shape[0] + x_shape[1];",
    header="typedef int Place;\n",
    strided=False,
)
SEED = 0xC70F6907


class Device:
    """Loads code by name and hash, as MLX does, and refuses what is no code."""

    def __init__(self, *, knows_keys: bool = True, is_right: bool = True) -> None:
        self.calls: list[dict[str, Any]] = []
        self._modules: set[tuple[str, int]] = set()
        self._knows_keys = knows_keys
        self._is_right = is_right

    def __call__(self, **call: Any) -> list[mx.array]:
        self.calls.append(call)
        code = call["compiled_source"]
        module = call["name"], string_hash(code) if self._knows_keys else len(code)
        if module not in self._modules:
            if not code.startswith(b"code of "):
                raise RuntimeError("Failed to load compiled kernel: device kernel image is invalid")
            self._modules.add(module)
        if call["name"] == "mlx_parallm_probe":
            (size,) = call["scalars"]
            return [call["inputs"][0] + size * self._is_right]
        shapes, dtypes = call["output_shapes"], call["output_dtypes"]
        nothing = 0 * call["inputs"][0].sum()
        return [
            mx.zeros(shape, dtype) + nothing.astype(dtype)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]

    @property
    def sources(self) -> list[bytes]:
        """Return the code of every call but the probe's."""
        return [call["compiled_source"] for call in self.calls if call["name"] == TEXT.name]


class Stock:
    """Return MLX's own kernel."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **call: Any) -> list[mx.array]:
        self.calls.append(call)
        return [mx.array([7])]


class Parts:
    """Return a kernel and its parts."""

    def __init__(
        self,
        folder: Path,
        device: Device,
        text: KernelText = TEXT,
        dtypes: Sequence[mx.Dtype] | None = None,
    ) -> None:
        self.sources: list[str] = []
        self.stock = Stock()
        compiler = KernelCompiler(self._compile, "", KernelStore(folder), threads=1)
        self.precompiler = Precompiler(compiler, device, CUDA_TYPES)
        self.kernel = PrecompiledKernel(text, self.precompiler, lambda: self.stock, dtypes)

    def _compile(self, source: str, name: str) -> bytes:
        self.sources.append(source)
        if "mistake" in source:
            raise CompilationError(f"{name}: no such thing as a mistake")
        return f"code of {source}".encode()

    def run(self, dtype: mx.Dtype = mx.float32) -> list[mx.array]:
        return self.kernel(
            inputs=[mx.zeros((2, 3), dtype), mx.zeros((4,), mx.int32)],
            output_shapes=[(5,)],
            output_dtypes=[dtype],
            grid=(256, 1, 1),
            threadgroup=(128, 1, 1),
        )


def test_a_program_has_the_arguments_that_mlx_passes() -> None:
    program = program_of(TEXT, (mx.bfloat16, mx.int32, mx.float32), CUDA_TYPES)
    assert program is not None
    assert program.source == (
        "typedef int Place;\n"
        'extern "C" __global__ void scale(const __nv_bfloat16* x, const int* slots, float* y, '
        "const int x_size_0, const int x_size_1) {\n"
        "y[0] = x[x_size_1] * slots[0] + x_size_0 + x_size_1;\n}\n"
    )
    assert program.sizes == ((0, 0), (0, 1))


def test_a_kernel_gets_its_shared_memory_and_its_registers(tmp_path: Path) -> None:
    text = replace(TEXT, residency=Residency(shared_bytes=90_000, threads=128, threadgroups=2))
    device = Device()
    parts = Parts(tmp_path, device, text)
    parts.run()
    assert f"__global__ void __launch_bounds__(128, 2) {TEXT.name}(" in parts.sources[-1]
    calls = [call for call in device.calls if call["name"] == TEXT.name]
    assert [call["shared_memory"] for call in calls] == [90_000]


@pytest.mark.parametrize(
    "source", ["y[0] = x[x_strides[0]];", "y[0] = x_ndim;", "y[0] = x_shape[slots[0]];"]
)
def test_what_a_precompiled_kernel_cannot_be_told_is_left_to_mlx(
    tmp_path: Path, source: str
) -> None:
    text = KernelText("scale", ("x", "slots"), ("y",), source, "", strided=True)
    device = Device()
    parts = Parts(tmp_path, device, text, (mx.float32, mx.int32, mx.float32))
    assert parts.run()[0].tolist() == [7]
    assert device.calls == []
    assert parts.sources == []


def test_a_call_passes_everything_and_later_ones_only_a_key(tmp_path: Path) -> None:
    device = Device()
    parts = Parts(tmp_path, device)
    for _ in range(3):
        (output,) = parts.run()
        assert (output.shape, output.dtype) == ((5,), mx.float32)
    call = device.calls[-1]
    assert call["scalars"] == [2, 3]
    assert (call["grid"], call["threadgroup"]) == ((256, 1, 1), (128, 1, 1))
    assert call["ensure_row_contiguous"]
    code, *later = device.sources
    assert code.startswith(b"code of ")
    assert later == [module_key(code)] * 2
    assert parts.stock.calls == []


def test_every_combination_of_dtypes_has_its_own_code(tmp_path: Path) -> None:
    device = Device()
    parts = Parts(tmp_path, device)
    for dtype in (mx.float32, mx.bfloat16, mx.float32, mx.float64):
        parts.run(dtype)
    assert [b"__nv_bfloat16* x" in source for source in device.sources[:2]] == [False, True]
    assert len(device.sources) == 3
    assert len(parts.stock.calls) == 1  # The table lacks CUDA's name of float64.


def test_known_dtypes_are_compiled_before_the_first_call(tmp_path: Path) -> None:
    parts = Parts(tmp_path, Device(), dtypes=(mx.float32, mx.int32, mx.float32))
    program = program_of(TEXT, (mx.float32, mx.int32, mx.float32), CUDA_TYPES)
    assert program is not None
    parts.precompiler.compiler.begin(program.source, program.name).result()
    assert parts.sources == [program.source]
    parts.run()
    assert parts.sources.count(program.source) == 1


def test_a_call_that_is_traced_passes_the_code_and_loads_nothing(tmp_path: Path) -> None:
    device = Device()
    parts = Parts(tmp_path, device)
    assert parts.precompiler.why_not is None
    traced = mx.compile(lambda x: parts.kernel(
        inputs=[x, mx.zeros((4,), mx.int32)], output_shapes=[(5,)], output_dtypes=[mx.float32],
        grid=(1, 1, 1), threadgroup=(1, 1, 1),
    )[0] + x[0, 0])  # fmt: skip
    mx.eval(traced(mx.zeros((2, 3))))
    parts.run()
    parts.run()
    code, again, key = device.sources
    assert code == again
    assert key == module_key(code)


def test_where_mlx_does_not_know_keys_every_call_passes_the_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    device = Device(knows_keys=False)
    parts = Parts(tmp_path, device)
    for _ in range(3):
        parts.run()
    assert {source[:8] for source in device.sources} == {b"code of "}
    assert "whole code" in caplog.text
    assert parts.stock.calls == []


def test_where_the_first_kernel_is_wrong_mlx_compiles_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device(is_right=False)
    parts = Parts(tmp_path, device)
    for _ in range(2):
        assert parts.run()[0].tolist() == [7]
    assert device.sources == []
    assert len(device.calls) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_text_that_does_not_compile_is_left_to_mlx(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = KernelText("scale", ("x", "slots"), ("y",), "mistake", "", strided=False)
    parts = Parts(tmp_path, Device(), text)
    assert parts.run()[0].tolist() == [7]
    assert "no such thing as a mistake" in caplog.text


def test_without_a_compiler_kernels_are_made_by_mlx() -> None:
    language = CudaLanguage(lambda: None)
    # MLX's build for a CPU fails here; its error names the function that was called.
    with pytest.raises(RuntimeError, match="cuda_kernel"):
        language.make(KernelText("k", ("x",), ("y",), "y[0] = x[0];", "", strided=False))


def test_a_language_begins_to_compile_what_it_makes(tmp_path: Path) -> None:
    parts = Parts(tmp_path, Device())
    language = CudaLanguage(lambda: parts.precompiler)
    dtypes = (mx.float32, mx.int32, mx.float32)
    kernel = language.make(TEXT, dtypes)
    assert isinstance(kernel, PrecompiledKernel)
    program = program_of(TEXT, dtypes, CUDA_TYPES)
    assert program is not None
    parts.precompiler.compiler.begin(program.source, program.name).result()
    assert parts.sources == [program.source]


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 16, 1000, 4099])
def test_a_key_has_the_hash_of_the_code(length: int) -> None:
    code = bytes(number * 37 % 256 for number in range(length))
    key = module_key(code)
    assert len(key) == 8
    assert string_hash(key) == string_hash(code)
    try:
        library = ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return  # With another standard library MLX's kernels are not launched.
    of_library = library._ZSt11_Hash_bytesPKvmm
    of_library.restype = ctypes.c_uint64
    of_library.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t]
    assert string_hash(code) == of_library(code, length, SEED)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("sm_90", "sm_90a"), ("sm_89", "sm_89"), ("sm_120", "sm_120a"), ("x86_64", None), ("", None)],
)
def test_code_is_for_the_device_with_its_own_instructions(name: str, wanted: str | None) -> None:
    assert device_architecture({"architecture": name}) == wanted


def test_headers_are_looked_for_where_mlx_looks_first(tmp_path: Path) -> None:
    def with_headers(folder: Path) -> Path:
        folder.mkdir(parents=True)
        for name in ("cuda_bf16.h", "cuda_fp16.h"):
            (folder / name).touch()
        return folder

    mlx, elsewhere = tmp_path / "site" / "mlx", tmp_path / "other"
    (mlx / "include" / "cccl").mkdir(parents=True)
    bundled = (mlx / "include", mlx / "include" / "cccl")
    assert include_folders(mlx, [str(elsewhere)], {"CUDA_HOME": str(tmp_path)}) in (
        (),
        (*bundled, Path("/usr/local/cuda/include")),
    )
    on_path = with_headers(elsewhere / "nvidia" / "cuda_runtime" / "include")
    home = with_headers(tmp_path / "include")
    assert include_folders(mlx, [str(elsewhere)], {"CUDA_HOME": str(tmp_path)}) == (*bundled, home)
    package = with_headers(tmp_path / "site" / "nvidia" / "cu13" / "include")
    assert include_folders(mlx, [], {}) == (*bundled, package)
    assert on_path.is_dir()


def test_the_folder_is_the_users_cache_unless_a_setting_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert kernel_folder(None, {}) == Path("/home/ada/.cache/mlx_parallm/kernels")
    assert kernel_folder(None, {"XDG_CACHE_HOME": "relative"}) == kernel_folder(None, {})
    assert kernel_folder(None, {"XDG_CACHE_HOME": "/c"}) == Path("/c/mlx_parallm/kernels")
    chosen = {"XDG_CACHE_HOME": "/c", "MLX_PARALLM_KERNEL_CACHE_DIR": "/k"}
    assert kernel_folder(None, chosen) == Path("/k")
    assert kernel_folder("~/mine", chosen) == Path("/home/ada/mine")
    assert kernel_folder("none", chosen) is None
    assert kernel_folder(None, {"MLX_PARALLM_KERNEL_CACHE_DIR": "none"}) is None
