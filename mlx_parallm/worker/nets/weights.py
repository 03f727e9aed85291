"""The weights of a loaded net: replaced whole between two forwards, or offloaded while asleep."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx

from mlx_parallm.adapters.arrays import to_host, to_mlx
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.models.nets.plan import NetPlan
from mlx_parallm.types.errors import InvalidRequestError, ModelLoadError

#: ``FILE``: the weights of a folder.
FILE = "model.safetensors"
PARAM = "weights"


class NetWeights:
    """The arrays of one net, by the names in its file.

    Attributes:
        arrays: those that forwards compute with.
    """

    def __init__(self, path: Path, plan: NetPlan) -> None:
        """Read the weights of a folder.

        Raises:
            ModelLoadError: they do not suit the plan.
        """
        self._path = path
        self._plan = plan
        self._prepared: tuple[dict[str, mx.array], Path | None] | None = None
        self._kept: dict[str, HostTensor] | None = None
        self._is_away = False
        self.arrays: dict[str, mx.array] = {}
        self.arrays = self._read(path)

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        return sum(array.nbytes for array in self.arrays.values())

    def prepare_folder(self, path: Path) -> None:
        """Read all weights of another folder for ``commit``.

        Raises:
            InvalidRequestError: they do not suit the net.
        """
        try:
            self._prepared = self._read(path), path
        except ModelLoadError as problem:
            raise InvalidRequestError(str(problem), param=PARAM) from None

    def prepare_tensors(self, tensors: Mapping[str, HostTensor]) -> None:
        """Check some weights and keep them for ``commit``, cast to the net's dtypes.

        Raises:
            InvalidRequestError: the net has no such weights, or of other shapes or kinds of
                numbers, or these are not finite; or the weights are offloaded.
        """
        if self._is_away:
            raise InvalidRequestError(
                "The weights are not in memory, because the server is asleep; wake it up first.",
                param=PARAM,
            )
        arrays = {name: to_mlx(tensor) for name, tensor in tensors.items()}
        try:
            arrays = self._fitting(arrays, is_whole=False)
        except ModelLoadError as problem:
            raise InvalidRequestError(str(problem), param=PARAM) from None
        self._prepared = self.arrays | arrays, None

    def commit(self) -> None:
        """Compute with the prepared weights from now on."""
        assert self._prepared is not None, "nothing was prepared"
        (self.arrays, path), self._prepared = self._prepared, None
        self._path = path or self._path
        self._is_away, self._kept = False, None

    def drop_prepared(self) -> None:
        """Drop the prepared weights, if there are any."""
        self._prepared = None

    def checksums(self) -> dict[str, str]:
        """Return the SHA-256 of each weight's dtype, shape and numbers, in hex by name."""
        return {name: to_host(array).checksum() for name, array in self.arrays.items()}

    def offload(self, *, keeps: bool) -> None:
        """Take the weights off the device until ``fetch``; with ``keeps`` to the host's memory."""
        self._prepared = None
        if self._is_away:
            return
        self._kept = {name: to_host(array) for name, array in self.arrays.items()}
        if not keeps:
            self._kept = None
        # Placeholders keep dtypes and shapes without the memory.
        self.arrays = {
            name: mx.broadcast_to(mx.zeros((), array.dtype), array.shape)
            for name, array in self.arrays.items()
        }
        mx.eval(self.arrays)
        self._is_away = True

    def fetch(self) -> bool:
        """Restore the weights; True if they were not kept, and were read from the folder."""
        if not self._is_away:
            return False
        kept, self._kept = self._kept, None
        if kept is None:
            self.arrays = self._read(self._path)
        else:
            self.arrays = {name: to_mlx(tensor) for name, tensor in kept.items()}
            mx.eval(self.arrays)
        self._is_away = False
        return kept is None

    def _read(self, path: Path) -> dict[str, mx.array]:
        """Return the weights of a folder; raise ModelLoadError, which names it, if they do not fit.

        MLX reads numbers when they are needed, and may find only then that some are missing.
        """
        try:
            arrays = mx.load(str(path / FILE))
            assert isinstance(arrays, dict), "a safetensors file has arrays by name"
            return self._fitting(arrays, is_whole=True)
        except ModelLoadError as problem:
            raise ModelLoadError(f"{path}: {FILE}: {problem}") from None
        except (RuntimeError, OSError, ValueError) as problem:
            raise ModelLoadError(f"{path}: {FILE} cannot be read: {problem}") from None

    def _fitting(self, arrays: Mapping[str, mx.array], *, is_whole: bool) -> dict[str, mx.array]:
        """Return weights that the plan has, evaluated, in the dtypes of those that they replace.

        ``is_whole`` is False if some may be missing.

        Raises:
            ModelLoadError: they do not suit the plan, or are not finite.
        """
        forms = {name: (array.shape, _dtype_name(array)) for name, array in arrays.items()}
        if fault := self._plan.weight_fault(forms, is_whole=is_whole):
            raise ModelLoadError(f"{fault[0].upper()}{fault[1:]}.")
        _check_finite(arrays)
        dtypes = {name: array.dtype for name, array in self.arrays.items()}
        cast = {name: array.astype(dtypes.get(name, array.dtype)) for name, array in arrays.items()}
        # The net's dtype may be too narrow for what was sent.
        _check_finite(cast)
        mx.eval(cast)
        return cast


def _dtype_name(array: mx.array) -> str:
    return str(array.dtype).removeprefix("mlx.core.")


def _check_finite(arrays: Mapping[str, mx.array]) -> None:
    for name, array in arrays.items():
        if mx.issubdtype(array.dtype, mx.floating) and not mx.isfinite(array).all().item():
            raise ModelLoadError(f"{name!r} has NaN or infinite numbers.")
