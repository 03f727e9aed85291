"""Computes the features of inputs, a stage at a time where a tower computes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx
import numpy as np

from mlx_parallm.adapters.arrays import to_mlx
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.models.vision.features import Features, Stages, Tower, TwoWay
from mlx_parallm.types.model_input import FEATURE, POSITIONS, TOKEN_IDS, InputKind
from mlx_parallm.worker.generation.inputs.rows import InputFeatures

# OWN_ARRAYS: arrays of an image that are not the tower's.
OWN_ARRAYS = (TOKEN_IDS, POSITIONS)
Tensors = Mapping[str, HostTensor]


class InputComputer:
    """Computes inputs of one model.

    Attributes:
        features: what was computed.
        tower: computes the features of images; None if the model takes none.
    """

    def __init__(
        self,
        tower: Tower | None,
        dtype: mx.Dtype,
        *,
        two_way: TwoWay | None,
        waits: bool,
    ) -> None:
        """Prepare.

        Args:
            tower: see the attribute.
            dtype: of the model.
            two_way: where the rows of an image attend to later ones; None if nowhere.
            waits: True if each stage is computed when it returns; False if the device may still be
                at work on it.
        """
        self.features = InputFeatures()
        self.tower = tower
        self._dtype = dtype
        self._two_way = two_way
        self._waits = waits
        # Arrays that the device may still be at work on.
        self._begun: list[mx.array] = []

    @property
    def num_stages(self) -> int:
        """The stages of an image."""
        return 1 if self.tower is None else self.tower.num_stages

    @property
    def has_begun(self) -> bool:
        """True if arrays were begun that ``take_begun`` has not returned."""
        return bool(self._begun)

    def take_begun(self) -> list[mx.array]:
        """Return the arrays that were begun since the last call and may not be complete."""
        begun, self._begun = self._begun, []
        return begun

    def compute(self, *arrays: mx.array) -> None:
        """Compute arrays, or begin to: see ``waits`` and ``take_begun``."""
        if self._waits:
            mx.eval(*arrays)
        else:
            mx.async_eval(*arrays)
            self._begun += arrays

    def begin(self, slots: Sequence[int], kind: InputKind, inputs: Sequence[Tensors]) -> InputRun:
        """Begin to compute inputs together, whose rows go into these slots.

        Args:
            slots: one for each.
            kind: of all.
            inputs: their arrays; images have equal shapes, see ``Tower.stages``.
        """
        arrays = [{name: to_mlx(tensor) for name, tensor in each.items()} for each in inputs]
        if kind is not InputKind.IMAGE:
            return self._run(slots, inputs, _rows_of(arrays), 1)
        tower = self.tower
        assert tower is not None, "an image was admitted that the model does not take"
        own = [{name: each[name] for name in each if name not in OWN_ARRAYS} for each in arrays]
        ids = [each[TOKEN_IDS] for each in arrays]

        def stages() -> Stages:
            made = yield from tower.stages(own)
            pairs = zip(made, ids, strict=True)
            return [over_span(each, marks, self._dtype) for each, marks in pairs]

        return self._run(slots, inputs, stages(), tower.num_stages, two_way=self._two_way)

    def _run(
        self,
        slots: Sequence[int],
        inputs: Sequence[Tensors],
        stages: Stages,
        num_stages: int,
        *,
        two_way: TwoWay | None = None,
    ) -> InputRun:
        ids = [each.get(POSITIONS) for each in inputs]
        positions = [None if each is None else np.array(each.array) for each in ids]
        marked = [_is_feature(each) for each in inputs]

        def keep(made: Sequence[Features]) -> None:
            parts = zip(slots, made, positions, marked, strict=True)
            for slot, features, own, is_feature in parts:
                rows = features.rows.astype(self._dtype)
                layers = mx.stack(list(features.layers)) if features.layers else None
                self.compute(rows, *(() if layers is None else (layers,)))
                self.features.put(
                    slot, run, rows, own, layers=layers, two_way=two_way, is_feature=is_feature
                )

        run = InputRun(stages, num_stages, self.compute, keep)
        self.features.expect(slots, run)
        return run


def _is_feature(tensors: Tensors) -> np.ndarray | None:
    """Return which rows of an input are not tokens, bool ``[rows]``; None if all are not."""
    ids = tensors.get(TOKEN_IDS)
    if ids is None:
        return None
    is_feature = np.array(ids.array) == FEATURE
    return None if is_feature.all() else is_feature


def _rows_of(arrays: Sequence[Mapping[str, mx.array]]) -> Stages:
    """Return the rows that inputs bring."""
    yield from ()
    return [Features(each["rows"]) for each in arrays]


class InputRun:
    """Inputs that are being computed. Implements ``Pending``.

    Attributes:
        num_stages: stages that are left.
    """

    def __init__(
        self,
        stages: Stages,
        num_stages: int,
        evaluate: Callable[..., None],
        keep: Callable[[Sequence[Features]], None],
    ) -> None:
        """Compute ``stages``; ``keep`` takes the features."""
        self.num_stages = num_stages
        self._stages: Stages | None = stages
        self._evaluate = evaluate
        self._keep = keep

    def advance(self) -> None:
        """See ``Pending``."""
        assert self.num_stages > 1, "the last stage is computed by wait"
        self.num_stages -= 1
        if self._stages is not None:
            self._evaluate(next(self._stages))

    def wait(self) -> None:
        """See ``Pending``; nothing waits for the device if steps run ahead."""
        while self.num_stages > 1:
            self.advance()
        stages, self._stages = self._stages, None
        if stages is None:
            return
        try:
            next(stages)
        except StopIteration as end:
            self._keep(end.value)
        else:
            raise AssertionError("the tower has more stages than it says")

    def drop(self) -> None:
        """Free what was computed so far; the result is not needed."""
        self._stages = None


def over_span(features: Features, token_ids: mx.array, dtype: mx.Dtype) -> Features:
    """Return the features of an image with a row for each of its span, lazily.

    Rows of marks have no meaning: their embeddings are those of their tokens, which adapters may
    change.

    Args:
        features: of the tower.
        token_ids: of the span, int32 ``[rows]``, with ``FEATURE`` where a row is one of the
            tower's.
        dtype: of the model.
    """
    rows = (features.rows / features.scale).astype(dtype)
    layers = tuple(each.astype(dtype) for each in features.layers)
    if rows.shape[0] == token_ids.shape[0]:
        return Features(rows, layers)
    is_feature = token_ids == FEATURE
    places = mx.maximum(mx.cumsum(is_feature.astype(mx.int32)) - 1, 0)
    return Features(rows[places], tuple(each[places] for each in layers))
