"""The tokenizer of transformers for a model of ``LLM``."""

from __future__ import annotations

from mlx_parallm.config import ModelConfig
from mlx_parallm.engine.model_files import model_folder
from mlx_parallm.serving.kinds import ignore_progress
from mlx_parallm.tokenizer.loaded import HubTokenizer
from mlx_parallm.tokenizer.loading import load_hub_tokenizer


def hub_tokenizer(model: ModelConfig) -> HubTokenizer:
    """Return the tokenizer; raise ModelLoadError if transformers cannot load it."""
    return load_hub_tokenizer(
        model_folder(model, ignore_progress),
        chat_template=model.chat_template,
        trust_remote_code=model.trust_remote_code,
    )
