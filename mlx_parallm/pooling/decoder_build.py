"""Reads from a decoder's files how it is served as a pooling model."""

from __future__ import annotations

from pathlib import Path

from mlx_parallm.config import ModelConfig, ModelTask
from mlx_parallm.models.checkpoints.model_task import has_head, task_of
from mlx_parallm.models.checkpoints.sentence_transformers import (
    module_kind,
    read_fields,
    read_json,
)
from mlx_parallm.tokenizer.decoder_tokenizer import DecoderTokenizer
from mlx_parallm.tokenizer.encoder_tokenizer import EncoderTokenizer
from mlx_parallm.tokenizer.loading import load_decoder_tokenizer
from mlx_parallm.types.errors import ModelLoadError


def chosen_tokens(path: Path, task: ModelTask, tokenizer: EncoderTokenizer) -> tuple[int, ...]:
    """Return the ids by which a reranker without a head scores, that of a match first.

    Other decoders have none; see ``PoolingSpec.chosen``.

    Raises:
        ModelLoadError: the vocabulary does not have them.
    """
    if task != "score":
        return ()
    config = read_json(path / "config.json")
    if has_head(config):
        return ()
    for module in read_json(path / "modules.json") or ():
        if module_kind(module) == "LogitScore":
            scores = read_fields(path / str(module["path"]) / "config.json")
            ids = (scores.get("true_token_id"), scores.get("false_token_id"))
            return tuple(token_id for token_id in ids if token_id is not None)
    # vLLM's field has the token of a mismatch first.
    tokens = list(reversed(config.get("classifier_from_token") or ("no", "yes")))
    ids = [tokenizer.token_id(token) for token in tokens]
    if None in ids:
        raise ModelLoadError(f"{path} cannot score: {tokens} are not tokens of its vocabulary.")
    return tuple(token_id for token_id in ids if token_id is not None)


def read_decoder_tokenizer(config: ModelConfig, path: Path) -> DecoderTokenizer:
    """Return the tokenizer of a decoder with a task other than ``generate``.

    Raises:
        ConfigError: ``chat_template`` is wrong.
        ModelLoadError: the folder has no tokenizer.
    """
    settings = read_fields(path / "config_sentence_transformers.json")
    prompts: dict[str | None, str] = settings.get("prompts") or {}
    instruction = prompts.get(settings.get("default_prompt_name"))
    return load_decoder_tokenizer(
        path,
        trust_remote_code=config.trust_remote_code,
        chat_template=config.chat_template,
        scores_pairs=task_of(config, path) == "score",
        instruction=instruction,
    )
