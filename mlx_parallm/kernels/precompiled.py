"""Kernels compiled beside MLX, which launches their machine code."""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
from typing_extensions import override

from mlx_parallm.kernels.compiler import CompilationError, KernelCompiler
from mlx_parallm.kernels.kernel import Kernel, KernelText

logger = logging.getLogger(__name__)

#: ``Launch`` is ``mx.fast.precompiled_cuda_kernel``, or a fake of it.
Launch = Callable[..., list[mx.array]]

_PROBE = KernelText(
    name="mlx_parallm_probe",
    input_names=("x",),
    output_names=("y",),
    source="y[threadIdx.x] = x[threadIdx.x] + x_shape[0];",
    header="",
    strided=False,
)
_PROBE_VALUES = (3, 4, 5)
# std::hash of strings in libstdc++ is MurmurHash64A with this seed.
_SEED = 0xC70F6907
_FACTOR = 0xC6A4A7935BD1E995
_INVERSE = pow(_FACTOR, -1, 1 << 64)
_MASK = (1 << 64) - 1
_WORD = 8


@dataclass(frozen=True, slots=True)
class Program:
    """A complete CUDA source.

    Attributes:
        name: the kernel's name, which is not mangled.
        source: the source, with the kernel's signature.
        sizes: (input, axis) of the sizes that are the last arguments.
        shared_bytes: of dynamic shared memory.
    """

    name: str
    source: str
    sizes: tuple[tuple[int, int], ...]
    shared_bytes: int = 0


def program_of(
    text: KernelText, dtypes: Sequence[mx.Dtype], types: Mapping[mx.Dtype, str]
) -> Program | None:
    """Return the program of a kernel; None for one that ``mx.fast.cuda_kernel`` must launch.

    Its arguments are what MLX passes to a precompiled kernel: inputs, outputs and numbers. Sizes
    that the text uses are numbers. Strides cannot be, because MLX does not know those of an array
    that is not computed yet.

    Args:
        text: the kernel; it writes an input's size as ``NAME_shape[AXIS]``.
        dtypes: dtypes of the inputs, then of the outputs.
        types: CUDA's names of dtypes.
    """
    if not all(dtype in types for dtype in dtypes):
        return None
    names = "|".join(map(re.escape, text.input_names))
    size = re.compile(rf"\b({names})_shape\[(\d+)\]")
    sizes = sorted({(name, int(axis)) for name, axis in size.findall(text.source)})
    body = size.sub(r"\1_size_\2", text.source)
    if re.search(rf"\b({names})_(shape|strides|ndim)\b", body):
        return None
    kinds = [types[dtype] for dtype in dtypes]
    count = len(text.input_names)
    arguments = [
        *(f"const {kind}* {name}" for kind, name in zip(kinds, text.input_names, strict=False)),
        *(f"{kind}* {name}" for kind, name in zip(kinds[count:], text.output_names, strict=True)),
        *(f"const int {name}_size_{axis}" for name, axis in sizes),
    ]
    bounds, shared_bytes = "", 0
    if text.residency is not None:
        bounds = f"__launch_bounds__({text.residency.threads}, {text.residency.threadgroups}) "
        shared_bytes = text.residency.shared_bytes
    signature = f'extern "C" __global__ void {bounds}{text.name}({", ".join(arguments)})'
    return Program(
        name=text.name,
        source=f"{text.header}{signature} {{\n{body}\n}}\n",
        sizes=tuple((text.input_names.index(name), axis) for name, axis in sizes),
        shared_bytes=shared_bytes,
    )


class PrecompiledKernel(Kernel):
    """A kernel that is compiled once for each combination of dtypes.

    A kernel that cannot be compiled beside MLX is left to ``mx.fast.cuda_kernel``.
    """

    def __init__(
        self,
        text: KernelText,
        precompiler: Precompiler,
        stock: Callable[[], Kernel],
        dtypes: Sequence[mx.Dtype] | None = None,
    ) -> None:
        """Start to compile for ``dtypes``, of inputs and outputs, if they are known.

        ``stock`` makes the kernel that MLX compiles.
        """
        self._text = text
        self._precompiler = precompiler
        self._stock = stock
        self._variants: dict[tuple[mx.Dtype, ...], Kernel] = {}
        if dtypes is not None:
            precompiler.begin(text, dtypes)

    @override
    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
    ) -> list[mx.array]:
        dtypes = (*[array.dtype for array in inputs], *output_dtypes)
        variant = self._variants.get(dtypes)
        if variant is None:
            variant = self._precompiler.kernel(self._text, dtypes) or self._stock()
            self._variants[dtypes] = variant
        return variant(
            inputs=inputs,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            grid=grid,
            threadgroup=threadgroup,
        )


class Precompiler:
    """Compiles kernels and passes MLX their machine code, if a trial shows that this works.

    Attributes:
        compiler: makes the machine code.
        takes_keys: True if MLX finds modules by a key of their code; see ``module_key``.
    """

    def __init__(
        self, compiler: KernelCompiler, launch: Launch, types: Mapping[mx.Dtype, str]
    ) -> None:
        """``launch`` runs machine code; ``types`` are CUDA's names of dtypes."""
        self.compiler = compiler
        self._launch = launch
        self._types = types
        self.takes_keys = True

    def begin(self, text: KernelText, dtypes: Sequence[mx.Dtype]) -> None:
        """Start to compile a kernel in the background."""
        program = program_of(text, dtypes, self._types)
        if program is not None:
            self.compiler.begin(program.source, program.name)

    def kernel(self, text: KernelText, dtypes: Sequence[mx.Dtype]) -> Kernel | None:
        """Return the compiled kernel; None for one that MLX must compile itself."""
        program = program_of(text, dtypes, self._types)
        if program is None or self.why_not is not None:
            return None
        try:
            return self._loaded(program, is_strided=text.strided)
        except CompilationError as problem:
            logger.warning("MLX compiles the kernel %s itself: %s", text.name, problem)
            return None

    @cached_property
    def why_not(self) -> str | None:
        """Return why MLX compiles all kernels itself; None if a precompiled kernel works.

        The first call launches a probe twice, the second time by its key (``module_key``).
        """
        program = program_of(_PROBE, (mx.int32, mx.int32), self._types)
        assert program is not None, "the probe uses no strides"
        try:
            probe = self._loaded(program, is_strided=False)
            if not _is_right(probe):
                reason = "the first kernel is wrong"
            else:
                self.takes_keys = self._is_known_by_key(probe)
                return None
        except (CompilationError, RuntimeError, TypeError, ValueError) as cause:
            reason = str(cause)
        logger.warning("MLX compiles the GPU kernels itself, which takes longer: %s", reason)
        return reason

    def _is_known_by_key(self, probe: LoadedKernel) -> bool:
        """Return True if MLX finds a loaded module by a key of its code."""
        try:
            if _is_right(probe):
                return True
        except RuntimeError as cause:
            logger.info("kernels are launched by their whole code: %s", cause)
        return False

    def _loaded(self, program: Program, *, is_strided: bool) -> LoadedKernel:
        code = self.compiler.code(program.source, program.name)
        key = module_key(code) if self.takes_keys else code
        return LoadedKernel(program, code, key, self._launch, is_strided=is_strided)


class LoadedKernel(Kernel):
    """A kernel that passes MLX its machine code at the first call, and only a key later."""

    def __init__(
        self, program: Program, code: bytes, key: bytes, launch: Launch, *, is_strided: bool
    ) -> None:
        self._program = program
        self._code = code
        self._key: bytes | None = key
        self._launch = launch
        self._is_strided = is_strided

    @override
    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
    ) -> list[mx.array]:
        options: dict[str, Any] = {
            "name": self._program.name,
            "compiled_source": self._code,
            "inputs": inputs,
            "output_shapes": output_shapes,
            "output_dtypes": output_dtypes,
            "scalars": [inputs[index].shape[axis] for index, axis in self._program.sizes],
            "grid": grid,
            "threadgroup": threadgroup,
            "ensure_row_contiguous": not self._is_strided,
        }
        if self._program.shared_bytes:
            options["shared_memory"] = self._program.shared_bytes
        outputs = self._launch(**options)
        if self._key is not None:
            self._load(outputs)
        return outputs

    def _load(self, outputs: list[mx.array]) -> None:
        """Load the module by evaluating the first call, so that later calls need only its key."""
        try:
            mx.eval(outputs)
        except ValueError:
            # The call is being traced and has no result; a later call will have one.
            return
        assert self._key is not None, "loaded before"
        self._code, self._key = self._key, None


def _is_right(probe: Kernel) -> bool:
    (output,) = probe(
        inputs=[mx.array(_PROBE_VALUES, mx.int32)],
        output_shapes=[(len(_PROBE_VALUES),)],
        output_dtypes=[mx.int32],
        grid=(len(_PROBE_VALUES), 1, 1),
        threadgroup=(len(_PROBE_VALUES), 1, 1),
    )
    return output.tolist() == [value + len(_PROBE_VALUES) for value in _PROBE_VALUES]


# Replaces a loaded module's machine code by eight bytes with the same hash.
#
# ``mx.fast.precompiled_cuda_kernel`` takes the machine code at every call. MLX finds the loaded
# module by the kernel's name and ``std::hash`` of the code, so each of a step's hundreds of calls
# would hash and copy all of it. Once a module is loaded, only the hash matters.


def string_hash(data: bytes) -> int:
    """Return ``std::hash<std::string>`` of libstdc++ on 64-bit machines."""
    whole = len(data) // _WORD * _WORD
    state = _begin(len(data))
    for (word,) in struct.iter_unpack("<Q", data[:whole]):
        state = (state ^ _mix(word * _FACTOR & _MASK) * _FACTOR) * _FACTOR & _MASK
    if whole < len(data):
        state = (state ^ int.from_bytes(data[whole:], "little")) * _FACTOR & _MASK
    return _mix(_mix(state) * _FACTOR & _MASK)


def module_key(code: bytes) -> bytes:
    """Return eight bytes with the hash of ``code``, which works because each step is invertible."""
    state = _mix(_mix(string_hash(code)) * _INVERSE & _MASK)
    word = state * _INVERSE & _MASK ^ _begin(_WORD)
    return struct.pack("<Q", _mix(word * _INVERSE & _MASK) * _INVERSE & _MASK)


def _begin(length: int) -> int:
    return _SEED ^ length * _FACTOR & _MASK


def _mix(state: int) -> int:
    """Mix the bits of a state; the function is its own inverse."""
    return state ^ state >> 47
