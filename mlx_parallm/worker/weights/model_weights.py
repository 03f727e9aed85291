"""The weights of a loaded model: replaced between two steps, or offloaded while asleep."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_unflatten

from mlx_parallm.adapters.arrays import to_host, to_mlx
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.numerics.finite import named, not_finite, scale_modes
from mlx_parallm.types.errors import (
    ConfigError,
    InvalidRequestError,
    ModelLoadError,
    RankLostError,
)
from mlx_parallm.worker.device.properties import backend_name
from mlx_parallm.worker.device.ranks import Ranks
from mlx_parallm.worker.device.room import check_room
from mlx_parallm.worker.device.shared_tensors import in_groups, on_devices
from mlx_parallm.worker.layers.row_layers import release_products
from mlx_parallm.worker.weights.loader import LoadedModel, load_parameters, parameters_of
from mlx_parallm.worker.weights.renaming import (
    PARAM,
    Renamer,
    checkpoint_shapes,
    left_alone,
    renamed_as_in,
)
from mlx_parallm.worker.weights.revision import DIGEST_BYTES, folder_revision

Arrays = Mapping[str, mx.array]

# FOLDER, TENSORS: what takes memory, in errors.
FOLDER = "Reading the weights of the folder"
TENSORS = "Preparing the tensors of an update"


class ModelWeights:
    """Changes the parameters of one model; the model object stays. Lives on the engine thread.

    Attributes:
        path: the folder that the weights came from last, updates by tensors not counted.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.path = loaded.path
        self._model = loaded.model
        self._sharding = loaded.sharding
        self._config = loaded.source
        self._is_cast = loaded.is_cast
        self._is_away = False
        self._kept: dict[str, HostTensor] | None = None
        self._rename = Renamer(loaded.model)
        # Folder of a checkpoint, and the shapes of its weights.
        self._shapes: tuple[Path, dict[str, tuple[int, ...]]] | None = None
        # Names of weights that are the model's as they are; None: not computed.
        self._left_alone: frozenset[str] | None = None

    def read_folder(self, path: Path) -> Arrays:
        """Return the weights of a checkpoint of the same architecture, checked and evaluated.

        Ranks must all call. Each reads the folder of its own machine.

        Raises:
            InvalidRequestError: it cannot be read, has other tensors, or numbers that are not
                finite; or ranks have other files there.
            RankLostError: another rank is gone.
        """
        ranks = None if self._sharding is None else self._sharding.ranks
        if ranks is not None:
            _refuse_other_files(path, ranks)
        try:
            arrays = load_parameters(self._config, path, is_cast=self._is_cast, ranks=ranks)
        except (ConfigError, ModelLoadError) as problem:
            raise InvalidRequestError(str(problem), param=PARAM) from None
        current = parameters_of(self._model)
        _refuse("are missing", current.keys() - arrays.keys())
        _refuse("are unknown", arrays.keys() - current.keys())
        # One tensor of the file is in memory at a time, beside those that are read.
        largest = max((array.nbytes for array in arrays.values()), default=0)
        check_room(largest + sum(array.nbytes for array in current.values()), FOLDER)
        fitting = self._fitting(arrays, current)
        _check_finite(fitting, self._scale_modes)
        return fitting

    def read_tensors(self, tensors: Mapping[str, HostTensor]) -> Arrays:
        """Return some of the weights, by their names in a checkpoint, checked and evaluated.

        A quantised layer takes a plain ``weight`` too, which is quantised as the layer is.

        Raises:
            InvalidRequestError: the model has no such tensors, or of other shapes, or numbers are
                not finite; or the weights are offloaded.
        """
        if self._is_away:
            raise InvalidRequestError(
                "The weights are not in memory, because the server is asleep; wake it up first.",
                param=PARAM,
            )
        current = parameters_of(self._model)
        if self._sharding is None:
            check_room(sum(tensor.nbytes for tensor in tensors.values()), TENSORS)
            return self._read({name: to_mlx(tensor) for name, tensor in tensors.items()}, current)
        return self._read_parts(tensors, self._sharding.ranks, current)

    def _read_parts(
        self, tensors: Mapping[str, HostTensor], ranks: Ranks, current: Arrays
    ) -> Arrays:
        """Return this rank's parts of tensors; see ``read_tensors``.

        The rank needs memory for its parts and for the largest tensor, unless names are unknown.
        """
        is_known = tensors.keys() <= current.keys()
        groups = deque(in_groups(tensors) if is_known else [tensors])
        parts: dict[str, mx.array] = {}
        try:
            sizes = [tensor.nbytes for tensor in tensors.values()]
            check_room(max(sizes, default=0) + sum(sizes) // ranks.size, TENSORS)
            while groups:
                parts |= self._read(on_devices(groups.popleft(), ranks), current)
        except RankLostError:
            raise
        except Exception:
            # The other ranks may find nothing wrong, and go on to the sums of the next groups.
            for group in groups:
                on_devices(group, ranks)
            raise
        return parts

    def _read(self, arrays: dict[str, mx.array], current: Arrays) -> Arrays:
        """Return tensors as the model keeps them, checked and evaluated; see ``read_tensors``."""
        # Packing would hide numbers that are not finite.
        _check_finite(arrays)
        arrays = self._renamed(arrays, current)
        arrays = {
            name: array
            for plain_name, value in arrays.items()
            for name, array in self._packed(plain_name, value, current).items()
        }
        _refuse("are unknown", arrays.keys() - current.keys())
        cast = [name for name, array in arrays.items() if array.dtype != current[name].dtype]
        check_room(sum(current[name].nbytes for name in cast), TENSORS)
        fitting = self._fitting(arrays, current)
        # The model's dtype may be too narrow for what was sent.
        _check_finite(fitting, self._scale_modes)
        return fitting

    def put(self, arrays: Arrays, path: Path | None = None) -> Callable[[], None]:
        """Replace weights of the model; return what puts those back that were there before.

        ``path`` is where all of them came from.
        """
        current = parameters_of(self._model)
        replaced = {name: current[name] for name in arrays}
        undo = partial(self._set, replaced, self.path, is_away=self._is_away, kept=self._kept)
        self._set(arrays, path or self.path, is_away=False, kept=None)
        return undo

    def _set(
        self,
        arrays: Arrays,
        path: Path,
        *,
        is_away: bool,
        kept: dict[str, HostTensor] | None,
    ) -> None:
        release_products(self._model)
        self._model.update(tree_unflatten(list(arrays.items())))
        self.path, self._is_away, self._kept = path, is_away, kept

    def offload(self, *, keeps: bool) -> None:
        """Take the weights off the device until ``fetch``.

        With ``keeps`` they go to the memory of the host; if that is the device's own, they stay.
        """
        if self._is_away or (keeps and not has_own_memory()):
            return
        current = parameters_of(self._model)
        self._kept = {n: to_host(array) for n, array in current.items()} if keeps else None
        release_products(self._model)
        # Placeholders keep the shapes, without the memory, so that new weights can be checked.
        empty = {n: mx.broadcast_to(mx.zeros((), a.dtype), a.shape) for n, a in current.items()}
        mx.eval(list(empty.values()))
        self._model.update(tree_unflatten(list(empty.items())))
        self._is_away = True

    def fetch(self) -> bool:
        """Restore the weights; True if they were not kept and were read from ``path``."""
        if not self._is_away:
            return False
        if self._kept is None:
            self.put(self.read_folder(self.path), self.path)
            return True
        arrays = {name: to_mlx(tensor) for name, tensor in self._kept.items()}
        mx.eval(list(arrays.values()))
        self.put(arrays)
        return False

    def checksums(self) -> dict[str, str]:
        """SHA-256 of each weight's dtype, shape and numbers, in hex by name.

        They are of whole weights; if ranks have parts of these, all must call.
        """
        sums = {}
        for name, array in parameters_of(self._model).items():
            whole = array if self._sharding is None else self._sharding.whole(name, array)
            sums[name] = to_host(whole).checksum()
        return sums

    def _renamed(self, arrays: dict[str, mx.array], current: Arrays) -> dict[str, mx.array]:
        """Return weights by the names and in the form that mlx_lm gives them at load.

        Names that the checkpoint and the model share are those of the checkpoint, whose numbers and
        axes may be others.
        """
        shapes = self._checkpoint_shapes()
        if arrays.keys() <= current.keys() and not arrays.keys() <= shapes.keys():
            return arrays
        try:
            if not arrays.keys() < shapes.keys():
                return self._rename(arrays)
            same = self._same(arrays, shapes)
            others = {name: array for name, array in arrays.items() if name not in same}
            return same | (renamed_as_in(shapes, others, self._rename) if others else {})
        except (KeyError, ValueError, IndexError, AttributeError, TypeError) as cause:
            raise InvalidRequestError(
                f"These tensors alone cannot be given the model's own names: {cause!r}.",
                param=PARAM,
            ) from None

    def _same(self, arrays: Arrays, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, mx.array]:
        """Return those arrays that a load would leave as they are.

        That is computed once: it takes as long as a load gives names to the whole checkpoint.
        """
        if self._left_alone is None:
            self._left_alone = left_alone(shapes, self._rename)
        return {
            name: array
            for name, array in arrays.items()
            if name in self._left_alone and array.shape == shapes[name]
        }

    @cached_property
    def _scale_modes(self) -> Mapping[str, str]:
        return scale_modes(self._model)

    def _checkpoint_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights in the folder; empty if it cannot be read."""
        if self._shapes is None or self._shapes[0] != self.path:
            self._left_alone = None
            try:
                self._shapes = self.path, checkpoint_shapes(self.path)
            except (ModelLoadError, OSError, RuntimeError, ValueError):
                self._shapes = self.path, {}
        return self._shapes[1]

    def _packed(self, name: str, value: mx.array, current: Arrays) -> dict[str, mx.array]:
        """Return a tensor as the model keeps it: packed if only its layer is."""
        path, _, leaf = name.rpartition(".")
        is_plain = mx.issubdtype(value.dtype, mx.floating)
        if leaf != "weight" or f"{path}.scales" not in current or not is_plain:
            return {name: value}
        layer: Any = dict(self._model.named_modules())[path]
        dtype = current[f"{path}.scales"].dtype
        try:
            packed, scales, *biases = mx.quantize(
                value.astype(dtype), group_size=layer.group_size, bits=layer.bits, mode=layer.mode
            )
        except ValueError as cause:
            raise InvalidRequestError(f"{name} cannot be packed: {cause}", param=PARAM) from None
        named = {f"{path}.weight": packed, f"{path}.scales": scales}
        return named | ({f"{path}.biases": biases[0]} if biases else {})

    def _fitting(self, arrays: dict[str, mx.array], current: Arrays) -> dict[str, mx.array]:
        """Return the arrays in the dtypes that the model has, and empty ``arrays``.

        Other shapes are refused. If ranks have parts of the model, arrays are whole, and this
        rank's parts are returned; one array that was lazy is whole in memory at a time.
        """
        shapes = {name: self._whole_shape(name, current[name]) for name in arrays}
        wrong = [name for name, value in arrays.items() if value.shape != shapes[name]]
        if wrong:
            first = min(wrong)
            raise InvalidRequestError(
                f"{first} is {list(arrays[first].shape)}, and the model's is "
                f"{list(shapes[first])} ({len(wrong)} tensors have other shapes).",
                param=PARAM,
            )
        kinds = {
            name
            for name, value in arrays.items()
            if mx.issubdtype(value.dtype, mx.floating)
            != mx.issubdtype(current[name].dtype, mx.floating)
        }
        _refuse("have another kind of numbers", kinds)
        fitting = {name: arrays.pop(name).astype(current[name].dtype) for name in list(arrays)}
        return fitting if self._sharding is None else self._sharding.parts(fitting)

    def _whole_shape(self, name: str, array: mx.array) -> tuple[int, ...]:
        if self._sharding is None:
            return array.shape
        return self._sharding.whole_shape(name, array.shape)


def has_own_memory() -> bool:
    """True if the device has memory of its own."""
    return backend_name() == "cuda"


def _refuse_other_files(path: Path, ranks: Ranks) -> None:
    """Raise InvalidRequestError on all ranks if one has other files in a folder than rank 0."""
    try:
        digest = bytes.fromhex(folder_revision(path))
    except OSError:
        # All ranks compare. If none can read the folder, the load says why.
        digest = bytes(DIGEST_BYTES)
    try:
        other = ranks.first_other(digest)
    except RuntimeError as problem:
        raise RankLostError(ranks.rank, f"cannot compare files: {problem}") from problem
    if other is not None:
        raise InvalidRequestError(
            f"Rank {other} has other files in {path} than rank 0, or none.", param=PARAM
        )


def _check_finite(arrays: Arrays, modes: Mapping[str, str] | None = None) -> None:
    """Evaluate arrays and refuse those with a NaN or an infinity; ``modes``: see ``not_finite``."""
    _refuse("have NaN or infinite values", not_finite(arrays, modes))


def _refuse(why: str, names: Collection[str]) -> None:
    if names:
        raise InvalidRequestError(f"Tensors {why}: {named(names)}.", param=PARAM)
