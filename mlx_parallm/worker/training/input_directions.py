"""The principal directions of the inputs of trained layers, from which adapters may start.

A random first factor reads random combinations of a layer's inputs. The principal directions are
those combinations that vary most on the texts that are trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from typing_extensions import override

from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.training import TrainedText
from mlx_parallm.worker.layers.wrapped_calls import Methods, WrappedCalls
from mlx_parallm.worker.ops import Pending
from mlx_parallm.worker.training.trainable import TrainedLayer
from mlx_parallm.worker.training.trained_model import TrainedModel

# MAX_TOKENS: tokens that the directions are computed from.
MAX_TOKENS = 4096
# MAX_BYTES: inputs of layers in memory, float32. Beyond it the texts are run again for more layers.
MAX_BYTES = 256 << 20
# OVERSAMPLING, NUM_ITERATIONS, SEED: of the subspace iteration (Halko et al., arXiv:0909.4061).
OVERSAMPLING = 8
NUM_ITERATIONS = 10
SEED = 0
# LEAST_SHARE: directions that vary less than this share of the first one are scaled as if they
# varied so much: noise must not be scaled up to the size of what the texts differ in.
LEAST_SHARE = 1e-2


class InputDirections(Pending):
    """The computation of first factors, one text or layer in a stage."""

    def __init__(
        self,
        model: TrainedModel,
        layers: Sequence[TrainedLayer],
        texts: Sequence[TrainedText],
        random: Mapping[str, mx.array],
    ) -> None:
        """Prepare.

        Args:
            model: runs the texts.
            layers: the trained layers.
            texts: at most ``MAX_TOKENS`` tokens of them are read.
            random: factors ``[rank, num_inputs]`` by path, for directions that the texts lack.
        """
        self._model, self._random = model, random
        self._texts = _first_tokens(texts)
        self._groups = _groups(layers, sum(len(text.token_ids) for text in self._texts))
        self._factors: dict[str, np.ndarray] = {}
        self._work = self._stages()
        self._num_stages = sum(len(self._texts) + len(group) for group in self._groups)

    @property
    @override
    def num_stages(self) -> int:
        return self._num_stages

    @override
    def advance(self) -> None:
        next(self._work)
        self._num_stages -= 1

    def wait(self) -> dict[str, np.ndarray]:
        """Return factors by path, float32 ``[rank, num_inputs]``."""
        for _ in self._work:
            self._num_stages -= 1
        return self._factors

    def _stages(self) -> Iterator[None]:
        for group in self._groups:
            inputs: dict[str, list[np.ndarray]] = {layer.path: [] for layer in group}
            for text in self._texts:
                self._read(text, inputs)
                yield
            for layer in group:
                rows = _joined(inputs.pop(layer.path), layer.path)
                fallback = np.array(self._random[layer.path])
                self._factors[layer.path] = whitened(rows, fallback)
                yield

    def _read(self, text: TrainedText, inputs: Mapping[str, list[np.ndarray]]) -> None:
        """Append what layers get for one text, float32 ``[tokens, num_inputs]``."""
        modules = {id(self._model.modules[path]): path for path in inputs}
        calls: list[tuple[str, mx.array]] = []
        wrap = partial(_recording, paths=modules, calls=calls)
        with WrappedCalls([self._model.modules[path] for path in inputs], wrap):
            self._model.run_layers(text)
        count = len(text.token_ids)
        rows = [(path, _rows(x, count).astype(mx.float32)) for path, x in calls]
        mx.eval([x for _, x in rows])
        for path, x in rows:
            inputs[path].append(np.array(x))


def whitened(inputs: np.ndarray, fallback: np.ndarray) -> np.ndarray:
    """Return the principal directions of inputs, each divided by the deviation along it.

    The product of the result with inputs like these varies by 1 in each component, so that a step
    size means the same for every layer.

    Args:
        inputs: float32 ``[n, num_inputs]``.
        fallback: float32 ``[rank, num_inputs]``: rows that take the place of directions along which
            the inputs do not vary.
    """
    rank, width = fallback.shape
    centred = inputs.astype(np.float64) - inputs.mean(axis=0, dtype=np.float64)
    width_of_basis = min(rank + OVERSAMPLING, len(inputs), width)
    start = np.random.default_rng(SEED).standard_normal((width, width_of_basis))
    basis = np.linalg.qr(start)[0]
    for _ in range(NUM_ITERATIONS):
        basis = np.linalg.qr(centred.T @ (centred @ basis))[0]
    _, sizes, directions = np.linalg.svd(centred @ basis, full_matrices=False)
    deviations = sizes[:rank] / np.sqrt(len(inputs))
    noise = np.abs(inputs).max(initial=0.0) * np.finfo(np.float32).eps
    count = int(np.sum(deviations > noise))
    factors = fallback.astype(np.float32)
    if count:
        scales = np.maximum(deviations[:count], LEAST_SHARE * deviations[0])
        factors = np.array(factors)
        factors[:count] = directions[:count] @ basis.T / scales[:, None]
    return factors


def _first_tokens(texts: Sequence[TrainedText]) -> list[TrainedText]:
    """Return the first texts, of at most ``MAX_TOKENS`` tokens together; at least one."""
    chosen: list[TrainedText] = []
    room = MAX_TOKENS
    for text in texts:
        room -= len(text.token_ids)
        if room < 0 and chosen:
            break
        chosen.append(text)
    return chosen


def _groups(layers: Sequence[TrainedLayer], num_tokens: int) -> list[list[TrainedLayer]]:
    """Divide layers so that the inputs of each group take at most ``MAX_BYTES``, or are one's."""
    groups: list[list[TrainedLayer]] = []
    room = 0
    for layer in layers:
        size = 4 * num_tokens * layer.num_inputs
        if size > room or not groups:
            groups.append([])
            room = MAX_BYTES
        groups[-1].append(layer)
        room -= size
    return groups


def _joined(parts: Sequence[np.ndarray], path: str) -> np.ndarray:
    """Return what a layer got for all texts; raise InvalidRequestError if it has no directions."""
    if not parts or not all(np.isfinite(part).all() for part in parts):
        why = "are not finite" if parts else "are none"
        raise InvalidRequestError(
            f"trainable.init: the inputs of {path} {why} on these texts.", param="trainable.init"
        )
    return np.concatenate(parts)


def _rows(x: mx.array, count: int) -> mx.array:
    """Return a layer's input for each token of one text, without those that pad it."""
    rows = x.reshape(-1, x.shape[-1])
    return rows[:count]


def _recording(
    original: Any, *, paths: Mapping[int, str], calls: list[tuple[str, mx.array]]
) -> Methods:
    def call(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        calls.append((paths[id(self)], x))
        return original.__call__(self, x, *args, **kwargs)

    return {"__call__": call}
