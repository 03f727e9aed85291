"""Forwards of an encoder with perturbed copies of a trainable adapter."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import mlx.core as mx

from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import PoolingInput
from mlx_parallm.worker.pooling.encoder_adapters import EncoderAdapters
from mlx_parallm.worker.pooling.layer_stages import StagedJob
from mlx_parallm.worker.training.layer_entry import LayerEntry
from mlx_parallm.worker.training.prefix_pool import PrefixPool
from mlx_parallm.worker.training.trainable import TrainableAdapter, TrainedLayer


class EncoderForwards:
    """Runs the inputs of a step through perturbed copies of one adapter, all copies at once.

    The layers before the lowest trained one compute the same for every copy and in every step, so
    their result is computed once for each text and kept in the pool.

    Attributes:
        first_layer: index of the lowest trained layer.
    """

    def __init__(
        self, encoder: EncoderAdapters, trainable: TrainableAdapter, pool: PrefixPool | None
    ) -> None:
        """Prepare.

        Args:
            encoder: runs the model.
            trainable: the adapter.
            pool: keeps what enters the lowest trained layer; None: every forward computes all
                layers.

        Raises:
            InvalidRequestError: all rows of a forward share the result of a trained layer, such as
                that of relative positions in DeBERTa, so that copies cannot have results of their
                own.
        """
        shared = sorted({layer.path for layer in trainable.layers} & set(encoder.shared))
        if shared:
            raise InvalidRequestError(
                f"{shared[0]} cannot be trained: all texts of a batch share what it computes.",
                param="targets",
            )
        self._encoder = encoder
        self._trainable = trainable
        self.first_layer = first_trained(encoder, trainable.layers)
        self._pool = pool if self.first_layer else None
        self._entry = LayerEntry(encoder.layers, self.first_layer)

    def begin(
        self, inputs: Sequence[PoolingInput], segments: Sequence[Sequence[int]], copies: mx.array
    ) -> StagedJob:
        """Return the forward of all segments, of which only the frozen layers are computed.

        Its results are those of the heads for each row, in the order of the segments.

        Args:
            inputs: the inputs of the step; none names an adapter.
            segments: for each copy, indices of its inputs; all have the same length.
            copies: the parameters of each copy, float32 ``[S, P]``.
        """
        rows = [inputs[index] for segment in segments for index in segment]
        stacks = self._trainable.stacks(copies)
        if self._pool is None:
            return self._encoder.changed_job(rows, stacks)
        hidden = self._entering(self._pool, inputs, self._encoder.length(rows))
        index = mx.array([index for segment in segments for index in segment])
        with self._entry.replaced(hidden[index]):
            return self._encoder.changed_job(rows, stacks, self.first_layer)

    def _entering(self, pool: PrefixPool, inputs: Sequence[PoolingInput], length: int) -> mx.array:
        """Return the hidden states that enter the lowest trained layer, ``[B, length, D]``."""
        by_key = {self._key(item): item for item in inputs}
        computed = {key: self._computed(by_key[key]) for key in pool.missing(list(by_key))}
        return pool.gather([self._key(item) for item in inputs], computed, length)

    def _computed(self, item: PoolingInput) -> mx.array:
        """Return the states of one text, ``[tokens, D]``.

        Each text has a forward of its own: the bits of a product depend on its number of rows, so
        the states of a text would differ from batch to batch.
        """
        with self._entry.captured() as captured:
            self._encoder.forward([item])
        states = captured[0][0, : len(item.token_ids)]
        mx.eval(states)
        return states

    def _key(self, item: PoolingInput) -> Hashable:
        return (self.first_layer, item.token_ids, item.second_at, item.num_unattended)


def first_trained(encoder: EncoderAdapters, layers: Sequence[TrainedLayer]) -> int:
    """Return the index of the lowest layer with a trained module; 0 if one is before all layers."""
    indices = {id(layer): index for index, layer in enumerate(encoder.layers)}
    paths = {
        path: indices[id(module)]
        for path, module in encoder.modules.items()
        if id(module) in indices
    }
    owners = [
        next((index for path, index in paths.items() if layer.path.startswith(f"{path}.")), 0)
        for layer in layers
    ]
    return min(owners)
