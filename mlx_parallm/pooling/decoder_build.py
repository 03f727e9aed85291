"""Loads a decoder that is served as an encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_parallm.config import ModelConfig, ModelTask
from mlx_parallm.models.checkpoints.decoders import reads_both_ways
from mlx_parallm.models.checkpoints.model_task import decoder_plan, decoder_task, has_head
from mlx_parallm.models.checkpoints.sentence_transformers import (
    VectorSpec,
    module_kind,
    module_kinds,
    read_json,
    read_vector_spec,
    transformer_folder,
)
from mlx_parallm.models.loading import ARCHITECTURES
from mlx_parallm.pooling.model import TextEncoder
from mlx_parallm.tokenizer.decoder_tokenizer import DecoderTokenizer, load_decoder_tokenizer
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.worker.pooling.decoder_loading import open_decoder
from mlx_parallm.worker.pooling.decoder_runner import DecoderRunner
from mlx_parallm.worker.pooling.pending_encoder import PendingEncoder


def task_of(config: ModelConfig, path: Path) -> ModelTask:
    """What a folder with a decoder is served for: what the user says, or what its files do.

    Raises:
        ModelLoadError: a file of it cannot be read.
    """
    if config.task != "auto":
        return config.task
    found = read_json(path / "config.json")
    # Whoever loads it says what is wrong.
    return decoder_task(found, module_kinds(path)) if isinstance(found, dict) else "generate"


def reads_on(path: Path) -> bool:
    """Whether the tokens of a folder's model attend to those before them only."""
    found = read_json(transformer_folder(path) / "config.json") or {}
    return found.get("model_type") not in ARCHITECTURES and not reads_both_ways(found)


def open_decoder_runner(
    config: ModelConfig, path: Path, task: ModelTask, tokenizer: TextEncoder
) -> PendingEncoder:
    """Open a decoder for a task other than ``generate``.

    Raises:
        ConfigError: an unknown dtype.
        ModelLoadError: it cannot be loaded, or not be read in this way.
    """
    model_config = read_json(path / "config.json")
    chosen = ()
    if task == "score" and not has_head(model_config):
        chosen = _chosen(path, model_config, tokenizer)
    plan = decoder_plan(task, model_config, chosen)
    spec = read_vector_spec(path, _vectors(model_config))
    opened = open_decoder(config, path, plan)
    return PendingEncoder(opened.model, path, lambda: DecoderRunner(opened, plan, spec))


def read_decoder_tokenizer(config: ModelConfig, path: Path) -> DecoderTokenizer:
    """The tokenizer for a task other than ``generate``.

    Raises:
        ConfigError: a wrong ``chat_template``.
        ModelLoadError: there is none.
    """
    settings = read_json(path / "config_sentence_transformers.json") or {}
    instruction = (settings.get("prompts") or {}).get(settings.get("default_prompt_name"))
    return load_decoder_tokenizer(
        path,
        trust_remote_code=config.trust_remote_code,
        chat_template=config.chat_template,
        scores_pairs=task_of(config, path) == "score",
        instruction=instruction,
    )


def _chosen(path: Path, config: dict[str, Any], tokenizer: TextEncoder) -> tuple[int, ...]:
    """Ids of the tokens that a reranker without a head scores by, the one for a match first.

    Raises:
        ModelLoadError: its vocabulary does not have them.
    """
    for module in read_json(path / "modules.json") or ():
        if module_kind(module) == "LogitScore":
            found = read_json(path / str(module["path"]) / "config.json") or {}
            ids = (found.get("true_token_id"), found.get("false_token_id"))
            return tuple(one for one in ids if one is not None)
    # vLLM's field has the token against a match first.
    tokens = list(reversed(config.get("classifier_from_token") or ("no", "yes")))
    ids = [tokenizer.token_id(token) for token in tokens]
    if None in ids:
        raise ModelLoadError(f"{path} cannot score: {tokens} are not tokens of its vocabulary.")
    return tuple(one for one in ids if one is not None)


def _vectors(config: dict[str, Any]) -> VectorSpec:
    """Where no file says how vectors are made; vLLM's rule."""
    return VectorSpec(poolings=("mean" if reads_both_ways(config) else "last",), normalizes=True)
