"""Wires the parts of an encoder's engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from mlx_parallm.config import EngineConfig, ModelConfig
from mlx_parallm.encoding.cross_encoder import scores_are_logits
from mlx_parallm.encoding.sentence_transformers import read_vector_spec
from mlx_parallm.engine.encode_engine import EncodeEngine
from mlx_parallm.engine.encoder_metrics import EncoderFamilies, EncoderMetrics
from mlx_parallm.engine.interface import EncoderModel
from mlx_parallm.errors import ConfigError
from mlx_parallm.runner.encoder_runner import load_encoder_runner
from mlx_parallm.tokenizer.encoder_tokenizer import load_encoder_tokenizer

# Tokens of a batch, padding included: more make no device busier.
MAX_TOKENS = 8192
# While streams wait for the batch: about what a step of some rows takes.
MAX_TOKENS_BESIDE = 256
# Distinct inputs; a request of more than that runs alone.
MAX_WAITING = 20_000


@dataclass(frozen=True, slots=True)
class BuiltEncoder:
    """An encoder that is ready to serve."""

    model: EncoderModel
    engine: EncodeEngine


def build_encoder(
    config: ModelConfig,
    path: Path,
    names: tuple[str, ...],
    settings: EngineConfig,
    families: EncoderFamilies,
) -> BuiltEncoder:
    """Load a folder of which ``is_encoder`` is true.

    Raises:
        ConfigError: an unknown dtype, or ``max_model_len`` beyond what the model takes.
        ModelLoadError: it cannot be loaded.
    """
    runner = load_encoder_runner(path, config.dtype, read_vector_spec(path))
    info = runner.info
    if len(info.labels) == 1:
        info = replace(info, scores_are_logits=scores_are_logits(path))
    if config.max_model_len is not None:
        if config.max_model_len > info.max_model_len:
            raise ConfigError(
                f"--max-model-len is {config.max_model_len}; {names[0]} takes "
                f"{info.max_model_len} tokens."
            )
        info = replace(info, max_model_len=config.max_model_len)
    model = EncoderModel(
        names=names,
        root=config.path or str(path),
        created=int(time.time()),
        tokenizer=load_encoder_tokenizer(path, trust_remote_code=config.trust_remote_code),
        info=info,
    )
    engine = EncodeEngine(
        runner,
        max_tokens=settings.scheduler.max_num_batched_tokens or MAX_TOKENS,
        max_tokens_beside=MAX_TOKENS_BESIDE,
        max_waiting=MAX_WAITING,
        metrics=EncoderMetrics(families, names[0]),
        cache_bytes=settings.encoders.cache_bytes,
    )
    return BuiltEncoder(model, engine)
