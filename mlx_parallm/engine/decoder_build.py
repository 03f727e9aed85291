"""Loads a decoder that is served as an encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_parallm.config import ModelConfig
from mlx_parallm.encoding.decoders import reads_both_ways
from mlx_parallm.encoding.model_task import ModelTask, decoder_plan, decoder_task
from mlx_parallm.encoding.sentence_transformers import (
    VectorSpec,
    module_kinds,
    read_json,
    read_vector_spec,
)
from mlx_parallm.runner.decoder_loading import open_decoder
from mlx_parallm.runner.decoder_runner import DecoderRunner
from mlx_parallm.runner.pending_encoder import PendingEncoder


def task_of(config: ModelConfig, path: Path) -> ModelTask:
    """What a folder with a decoder is served for.

    Raises:
        ModelLoadError: a file of it cannot be read.
    """
    found = read_json(path / "config.json")
    # Whoever loads it says what is wrong.
    return decoder_task(found, module_kinds(path)) if isinstance(found, dict) else "generate"


def open_decoder_runner(config: ModelConfig, path: Path, task: ModelTask) -> PendingEncoder:
    """Open a decoder for a task other than ``generate``.

    Raises:
        ConfigError: an unknown dtype.
        ModelLoadError: it cannot be loaded, or not be read in this way.
    """
    model_config = read_json(path / "config.json")
    plan = decoder_plan(task, model_config)
    spec = read_vector_spec(path, _vectors(model_config))
    opened = open_decoder(config, path, plan)
    return PendingEncoder(opened.model, path, lambda: DecoderRunner(opened, plan, spec))


def _vectors(config: dict[str, Any]) -> VectorSpec:
    """Where no file says how vectors are made; vLLM's rule."""
    return VectorSpec(poolings=("mean" if reads_both_ways(config) else "last",), normalizes=True)
