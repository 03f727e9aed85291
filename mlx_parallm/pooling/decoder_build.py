"""What the files of a decoder say of how it is served as a pooling model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_parallm.config import ModelConfig, ModelTask
from mlx_parallm.models.checkpoints.decoders import reads_both_ways
from mlx_parallm.models.checkpoints.model_task import decoder_task, has_head
from mlx_parallm.models.checkpoints.sentence_transformers import (
    module_kind,
    module_kinds,
    read_json,
    transformer_folder,
)
from mlx_parallm.models.loading import ARCHITECTURES
from mlx_parallm.pooling.model import TextEncoder
from mlx_parallm.tokenizer.decoder_tokenizer import DecoderTokenizer, load_decoder_tokenizer
from mlx_parallm.types.errors import ModelLoadError


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


def chosen_tokens(path: Path, task: ModelTask, tokenizer: TextEncoder) -> tuple[int, ...]:
    """Return the ids of the tokens that a decoder scores by; see ``PoolingSpec.chosen``.

    Raises:
        ModelLoadError: its vocabulary does not have them.
    """
    if task != "score":
        return ()
    model_config = read_json(path / "config.json")
    return () if has_head(model_config) else _chosen(path, model_config, tokenizer)


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
