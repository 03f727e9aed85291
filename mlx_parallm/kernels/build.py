"""Makes kernels from their texts and constants, each once."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from types import MappingProxyType

import mlx.core as mx

from mlx_parallm.kernels.kernel import Kernel, KernelText, Residency, kernel_text
from mlx_parallm.kernels.language import KernelLanguage

#: ``Constant``: a type or a number that is written into a kernel's text.
Constant = mx.Dtype | int | float
#: ``DtypeOf`` returns the dtype of an argument in a kernel with these constants; None if unknown.
DtypeOf = Callable[[str, Mapping[str, Constant]], mx.Dtype | None]
#: ``TYPES``: the names in texts of the types in which values are stored.
TYPES: Mapping[mx.Dtype, str] = MappingProxyType(
    {
        mx.float32: "float",
        mx.float16: "float16_t",
        mx.bfloat16: "bfloat16_t",
        mx.uint32: "unsigned",
    }
)
# SWITCHES: constants that are macros, because they choose lines of the texts.
SWITCHES = (
    *("BITS", "SPLIT", "SINKS", "BIAS", "SOFT_CAP", "WINDOW", "OUTPUTS", "EXPERTS"),
    *("FROM_POOL", "TO_POOL", "NORM", "FREQUENCIES", "MXFP4"),
    *("GATE", "RESIDUAL", "SPLITS", "IN_PARTS", "REGISTERS", "SLABS", "DIVIDES"),
    *("LINK", "LAST", "COUNTS"),
)


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """A kernel's text, its arguments, and the texts before it.

    Texts are files of the builder's folder: ``.metal`` for both languages, ``.cu`` for CUDA only.
    Inputs that are not contiguous are copied, unless the kernel is ``strided``. For ``residency``
    see ``KernelText``.
    """

    text: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    headers: tuple[str, ...] = ("common.metal",)
    strided: bool = False
    residency: Residency | None = None

    @property
    def name(self) -> str:
        """Return the text's name without folder and suffix."""
        return PurePath(self.text).stem


@dataclass(frozen=True, slots=True)
class Part:
    """One of several places of a text in a kernel.

    Attributes:
        condition: decides which threadgroups run the text.
        lines: stand before the text; they name the kernel's arguments as the text does.
        constants: of the text.
    """

    condition: str
    lines: str
    constants: Mapping[str, Constant]

    def scope(self, text: str) -> str:
        """Return the text in a scope of its own."""
        undefined = "".join(f"#undef {name}\n" for name in self.constants if name in SWITCHES)
        ahead = undefined + _constants(self.constants)
        return f"{self.condition}\n{{\n{ahead}{self.lines}{text}}}\n"


class KernelBuilder:
    """Makes and caches the kernels of one language.

    Constants are written into the text instead of passed as template arguments. That makes calls as
    cheap as MLX allows.
    """

    def __init__(
        self, language: KernelLanguage, texts: Path, prefix: str, dtype_of: DtypeOf | None = None
    ) -> None:
        """``texts`` is the folder of texts; ``prefix`` begins the kernels' names.

        With ``dtype_of``, kernels can be compiled in the background as soon as they are made.
        """
        self._language = language
        self._texts = texts
        self._prefix = prefix
        self._dtype_of = dtype_of
        self._made: dict[tuple[KernelSpec, tuple[tuple[str, Constant], ...]], Kernel] = {}

    def kernel(self, spec: KernelSpec, constants: Mapping[str, Constant]) -> Kernel:
        """Return the kernel for these constants."""
        key = (spec, tuple(constants.items()))
        kernel = self._made.get(key)
        if kernel is None:
            body = _constants(constants) + self._text(spec.text)
            kernel = self._made[key] = self._make(spec, body, constants)
        return kernel

    def joined(self, spec: KernelSpec, parts: Sequence[Part]) -> Kernel:
        """Return a new kernel that has the spec's text once for each part.

        Arguments have the dtypes that the first part's constants say.
        """
        text = self._text(spec.text)
        body = "".join(part.scope(text) for part in parts)
        return self._make(spec, body, parts[0].constants)

    def _make(self, spec: KernelSpec, body: str, constants: Mapping[str, Constant]) -> Kernel:
        name = f"{self._prefix}_{spec.name}_{zlib.crc32(body.encode()):08x}"
        header = self._language.words + "".join(map(self._text, spec.headers))
        text = KernelText(
            name, spec.inputs, spec.outputs, body, header, spec.strided, spec.residency
        )
        return self._language.make(text, self._dtypes(spec, constants))

    def _dtypes(self, spec: KernelSpec, constants: Mapping[str, Constant]) -> list[mx.Dtype] | None:
        """Return the dtypes of inputs and outputs; None unless all are known."""
        if self._dtype_of is None:
            return None
        dtypes = [self._dtype_of(name, constants) for name in (*spec.inputs, *spec.outputs)]
        known = [dtype for dtype in dtypes if dtype is not None]
        return known if len(known) == len(dtypes) else None

    def _text(self, name: str) -> str:
        return kernel_text(self._texts / name)


def _constants(constants: Mapping[str, Constant]) -> str:
    lines: list[str] = []
    for name, value in constants.items():
        if isinstance(value, mx.Dtype):
            lines.append(f"using {name} = {TYPES[value]};")
        elif name in SWITCHES:
            lines.append(f"#define {name} {int(value)}")
        elif isinstance(value, int):
            lines.append(f"constexpr int {name} = {value};")
        else:
            lines.append(f"constexpr float {name} = {float(value)!r}f;")
    return "\n" + "\n".join(lines) + "\n"
