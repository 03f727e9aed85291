"""Mutations of kernel texts: without one of their barriers or shuffles, or with a mistake."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_parallm.kernels.kernel import KernelText, kernel_text
from tests.kernels.shim_language import ORDERS, CudaShim, MetalShim, Shim

SHIMS: dict[str, Callable[[], Shim]] = {"cuda": CudaShim, "metal": MetalShim}
#: ``SYNCHRONISATION`` to remove, by the suffix of texts: a barrier becomes nothing, a shuffle the
#: lane's own value.
SYNCHRONISATION = {
    ".cu": r"__sync\w+\(\);|__shfl_xor_sync\(0xffffffff, (?P<own>.+?), far\)",
    ".metal": r"\w+_barrier\(.*?\);|simd_shuffle_xor\((?P<own>.+?), far\)",
}
ANY_SYNCHRONISATION = re.compile(r"sync|barrier|shfl|shuffle|simd_|quad_|vote|ballot|atomic", re.I)


def mutants(folder: Path) -> Iterator[tuple[str, str, int]]:
    """Yield, for each language, text and number of every barrier and shuffle in a folder."""
    for path in sorted(folder.glob("*.metal")):
        for nth in range(len(re.findall(SYNCHRONISATION[path.suffix], kernel_text(path)))):
            for language in SHIMS:
                yield language, path.stem, nth


def without(body: str, suffix: str, nth: int) -> str:
    """Return a text without its nth barrier or shuffle."""
    match = list(re.finditer(SYNCHRONISATION[suffix], body))[nth]
    return body[: match.start()] + (match["own"] or "") + body[match.end() :]


def overlooked(folder: Path) -> list[str]:
    """Return the texts with synchronisation that ``mutants`` does not know."""
    texts = {path.stem: kernel_text(path) for path in folder.glob("*.metal")}
    rest = {stem: re.sub(SYNCHRONISATION[".metal"], "", text) for stem, text in texts.items()}
    return [stem for stem, text in rest.items() if ANY_SYNCHRONISATION.search(text)]


def leave_out(shim: Shim, prefix: str, nth: int, suffix: str = ".metal") -> list[str]:
    """Remove a barrier or shuffle from kernels with this prefix; return a list of their bodies."""
    mutated: list[str] = []

    def mutate(name: str, body: str) -> str:
        if not name.startswith(prefix):
            return body
        mutated.append(body)
        return without(body, suffix, nth)

    shim.mutate = mutate
    return mutated


def passes_in_every_order(shim: Shim, why_not: Callable[[], str | None]) -> bool:
    """True if a check at load accepts its kernels in every order of threads."""
    for order in ORDERS:
        shim.order = order
        if why_not() is not None:
            return False
    return True


@dataclass(frozen=True)
class Mistake:
    """A text in a kernel's file, and a mistake to put in its place."""

    file: str
    right: str
    wrong: str


class MistakenShim(CudaShim):
    """Makes a mistake in kernels with this prefix, or in their headers."""

    def __init__(self, folder: Path, prefix: str, mistake: Mistake) -> None:
        super().__init__()
        assert mistake.right in kernel_text(folder / f"{mistake.file}.metal")
        self._prefix, self._mistake = prefix, mistake

    def make(self, text: KernelText, dtypes: Sequence[mx.Dtype] | None = None) -> Any:
        """See ``Shim.make``."""
        if text.name.startswith(self._prefix):
            right, wrong = self._mistake.right, self._mistake.wrong
            source, header = (part.replace(right, wrong) for part in (text.source, text.header))
            text = replace(text, source=source, header=header)
        return super().make(text, dtypes)
