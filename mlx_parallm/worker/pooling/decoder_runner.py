"""Runs a decoder as a pooling model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_parallm.models.checkpoints.decoder_sizes import (
    DEFAULT_MAX_MODEL_LEN,
    config_value,
    context_length,
)
from mlx_parallm.models.checkpoints.decoders import DecoderPlan, reads_both_ways, splits_window
from mlx_parallm.models.checkpoints.encoders import label_names, problem_type
from mlx_parallm.models.checkpoints.sentence_transformers import VectorSpec
from mlx_parallm.models.decoder_classes import trunk_of
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.types.pooling import PoolingInfo, PoolingInput
from mlx_parallm.worker.generation.row_selection import embedding_rows
from mlx_parallm.worker.pooling.decoder_model import DecoderModel, Reach
from mlx_parallm.worker.pooling.encoder_adapters import AdaptedEncoder, EncoderAdapters
from mlx_parallm.worker.pooling.encoder_heads import EncoderHeads, by_purpose, vector_facts
from mlx_parallm.worker.pooling.encoder_runner import padded
from mlx_parallm.worker.pooling.forward_shapes import ForwardShapes
from mlx_parallm.worker.pooling.score_heads import ScoreHeads
from mlx_parallm.worker.weights.loader import DTYPES, LoadedModel


class DecoderRunner(AdaptedEncoder):
    """Runs a decoder over inputs of mixed length."""

    def __init__(self, loaded: LoadedModel, plan: DecoderPlan, spec: VectorSpec) -> None:
        """Create a runner for a model of ``open_decoder``; ``spec`` says how vectors are made.

        Raises:
            ModelLoadError: the architecture cannot be run in this way.
        """
        model, config = loaded.model, loaded.config
        self._model = _checked_model(loaded)
        self._modules = model.modules()
        longest = context_length(config) or DEFAULT_MAX_MODEL_LEN
        self._shapes = ForwardShapes.of_device(longest)
        self.adapters = EncoderAdapters(
            model,
            EncoderHeads(self._model, spec),
            ScoreHeads(self._model, DTYPES.get(loaded.dtype, mx.float32), config),
            self._hidden,
            tasks=plan.tasks,
            dtype=loaded.dtype,
            shapes=self._shapes,
            config=loaded.config,
        )
        self._info = self._facts(loaded, plan, spec, longest)

    def _facts(
        self, loaded: LoadedModel, plan: DecoderPlan, spec: VectorSpec, longest: int
    ) -> PoolingInfo:
        """Return facts about the model; results of one token give the sizes."""
        config, num_labels = loaded.config, 0
        if plan.head != "none":
            (num_labels,) = self.run([PoolingInput((0,), "classify")])[0].shape
        return PoolingInfo(
            architecture=str(config["model_type"]),
            vocab_size=embedding_rows(loaded.model, config_value(config, "vocab_size")) or 0,
            max_model_len=min(longest, spec.max_model_len or longest),
            tasks=by_purpose(plan.tasks, spec),
            dims=len(self.run([PoolingInput((0,))])[0]),
            dtype=loaded.dtype,
            weight_bytes=loaded.weight_bytes,
            **vector_facts(spec),
            labels=_labels(config, num_labels),
            problem_type=problem_type(config) if num_labels else None,
        )

    def _hidden(self, inputs: Sequence[PoolingInput]) -> tuple[mx.array, mx.array]:
        """Return last hidden states ``[B, L, D]`` and the mask of tokens, bool ``[B, L]``."""
        ids, tokens = padded(inputs, self._shapes)
        mask = mx.array(tokens)
        return self._model(mx.array(ids), mask), mask


def _checked_model(loaded: LoadedModel) -> DecoderModel:
    """Return a model that passed its check.

    Raises:
        ModelLoadError: it did not; the message names the folder and the architecture.
    """
    model, config = loaded.model, loaded.config
    try:
        decoder = DecoderModel(
            trunk_of(model), model.get("score"), len(model.layers), _reach(config)
        )
        decoder.check()
    except ModelLoadError as problem:
        raise ModelLoadError(f"{loaded.path} ({config['model_type']}): {problem}") from problem
    return decoder


def _reach(config: dict[str, Any]) -> Reach | None:
    """Return how far a window reaches in bidirectional attention; None if attention is causal.

    The rules are those of transformers' masks: ``create_bidirectional_sliding_window_mask``, and
    Gemma 3's own.
    """
    if not reads_both_ways(config):
        return None
    return (lambda window: window // 2) if splits_window(config) else (lambda window: window)


def _labels(config: dict[str, Any], num_labels: int) -> tuple[str, ...]:
    """Return the labels' names, or numbers if the config names another count of labels."""
    named = label_names(config)
    if len(named) == num_labels:
        return named
    return tuple(f"LABEL_{number}" for number in range(num_labels))
