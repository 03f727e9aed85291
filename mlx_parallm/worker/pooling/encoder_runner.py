"""Runs an encoder as a pooling model."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_parallm.models.checkpoints.encoders import label_names, problem_type
from mlx_parallm.models.checkpoints.sentence_transformers import VectorSpec
from mlx_parallm.models.loading import LoadedEncoder
from mlx_parallm.types.pooling import PoolingInfo, PoolingInput
from mlx_parallm.worker.pooling.encoder_adapters import AdaptedEncoder, EncoderAdapters
from mlx_parallm.worker.pooling.encoder_heads import TASKS, EncoderHeads, by_purpose, vector_facts
from mlx_parallm.worker.pooling.forward_shapes import ForwardShapes
from mlx_parallm.worker.pooling.own_heads import LayerHeads
from mlx_parallm.worker.weights.loader import DTYPES


class EncoderRunner(AdaptedEncoder):
    """Runs an encoder over inputs of mixed length."""

    def __init__(self, loaded: LoadedEncoder, spec: VectorSpec) -> None:
        """``spec`` says how vectors are made."""
        self._model = loaded.model
        self._modules = loaded.model.modules()
        self._has_types = getattr(loaded.model.args, "type_vocab_size", 0) > 1
        longest: int = loaded.model.args.max_length
        tasks = TASKS[loaded.model.args.head]
        classifies = "classify" in tasks or "token_classify" in tasks
        self._shapes = ForwardShapes.of_device(longest)
        self.adapters = EncoderAdapters(
            loaded.model,
            EncoderHeads(loaded.model, spec),
            LayerHeads(loaded.model, DTYPES.get(loaded.dtype, mx.float32), loaded.config),
            self._hidden,
            tasks=tasks,
            dtype=loaded.dtype,
            shapes=self._shapes,
            config=loaded.config,
        )
        self._info = PoolingInfo(
            architecture=str(loaded.config["model_type"]),
            vocab_size=loaded.model.args.vocab_size,
            max_model_len=min(longest, spec.max_model_len or longest),
            tasks=by_purpose(tasks, spec),
            dims=len(self.run([PoolingInput((0,))])[0]),
            dtype=loaded.dtype,
            weight_bytes=loaded.weight_bytes,
            **vector_facts(spec),
            labels=label_names(loaded.config) if classifies else (),
            problem_type=problem_type(loaded.config) if classifies else None,
        )

    def _hidden(self, inputs: Sequence[PoolingInput]) -> tuple[mx.array, mx.array]:
        """Return last hidden states ``[B, L, D]`` and the mask of tokens, bool ``[B, L]``."""
        ids, tokens = padded(inputs, self._shapes)
        mask = mx.array(tokens)
        types = token_types(inputs, ids.shape[1]) if self._has_types else None
        # Without padding no mask is needed, and attention is faster without one.
        return self._model(mx.array(ids), None if tokens.all() else mask, types), mask


def padded(inputs: Sequence[PoolingInput], shapes: ForwardShapes) -> tuple[np.ndarray, np.ndarray]:
    """Return right-padded ids, int32 ``[B, L]``, and which are attended to, bool ``[B, L]``."""
    length = shapes.length(max(len(item.token_ids) for item in inputs))
    ids = np.zeros((len(inputs), length), dtype=np.int32)
    mask = np.zeros((len(inputs), length), dtype=bool)
    for row, item in enumerate(inputs):
        count = len(item.token_ids)
        ids[row, :count] = item.token_ids
        mask[row, : count - item.num_unattended] = True
    return ids, mask


def token_types(inputs: Sequence[PoolingInput], length: int) -> mx.array | None:
    """Return token types, int32 ``[B, length]``; None if no input has a second text."""
    if all(item.second_at is None for item in inputs):
        return None
    types = np.zeros((len(inputs), length), dtype=np.int32)
    for row, item in enumerate(inputs):
        if item.second_at is not None:
            types[row, item.second_at : len(item.token_ids)] = 1
    return mx.array(types)
