"""Loads the tokenizer of a pooling model's folder."""

from __future__ import annotations

from pathlib import Path

from mlx_parallm.config import ModelConfig
from mlx_parallm.models.checkpoints.encoders import is_encoder
from mlx_parallm.models.checkpoints.sentence_transformers import transformer_folder
from mlx_parallm.tokenizer.encoder_loading import load_encoder_tokenizer
from mlx_parallm.tokenizer.encoder_tokenizer import EncoderTokenizer


def tokenizer_of(config: ModelConfig, path: Path) -> EncoderTokenizer:
    """Return the tokenizer of a folder for which ``is_read`` is true.

    Raises:
        ModelLoadError: the folder has none.
    """
    model_folder = transformer_folder(path)
    if not is_encoder(model_folder):
        # It brings MLX, which the process of a server without an engine imports for such models
        # alone.
        from mlx_parallm.pooling.decoder_build import read_decoder_tokenizer  # noqa: PLC0415

        return read_decoder_tokenizer(config, path)
    return load_encoder_tokenizer(model_folder, trust_remote_code=config.trust_remote_code)
