"""The facts of an encoder-decoder that its ``config.json`` gives."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_parallm.models.checkpoints.decoder_sizes import context_length, learned_positions
from mlx_parallm.models.checkpoints.encoder_decoders import (
    ENCODER_DECODER_TYPES,
    SPEECH_TYPES,
    source_vocab_size,
    target_vocab_size,
)
from mlx_parallm.models.checkpoints.model_task import decoder_plan, decoder_task
from mlx_parallm.types.errors import ConfigError

TYPES = sorted(ENCODER_DECODER_TYPES)
T5 = {"mt5", "t5", "umt5"}
CLASSES = ("ForConditionalGeneration", "Model", "MTModel", "EncoderModel")


def test_speech_has_positions_of_its_decoder() -> None:
    assert context_length({"model_type": "whisper"}) == 448
    config = {"model_type": "whisper", "max_target_positions": 96, "max_source_positions": 1500}
    assert context_length(config) == learned_positions(config) == 96


@pytest.mark.parametrize("model_type", sorted(ENCODER_DECODER_TYPES - SPEECH_TYPES))
def test_only_positions_of_t5_have_no_end(model_type: str) -> None:
    config: dict[str, Any] = {"model_type": model_type, "n_positions": 512}
    assert context_length(config) == (None if model_type in T5 else 1024)
    longer = config | {"max_position_embeddings": 2048}
    assert context_length(longer) == learned_positions(longer)
    assert learned_positions(longer) == (None if model_type in T5 else 2048)


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("name", CLASSES)
def test_all_classes_generate_and_do_nothing_else(model_type: str, name: str) -> None:
    config = {"model_type": model_type, "architectures": [f"Any{name}"]}
    assert decoder_task(config, ()) == "generate"
    assert decoder_task(config, {"Pooling", "Dense"}) == "generate"
    with pytest.raises(ConfigError, match=f"--task embed: {model_type} can only generate"):
        decoder_plan("embed", config)


def test_only_marian_has_two_vocabularies() -> None:
    config = {"model_type": "marian", "vocab_size": 56, "decoder_vocab_size": 64}
    two = config | {"share_encoder_decoder_embeddings": False}
    assert (source_vocab_size(two), target_vocab_size(two)) == (56, 64)
    alike = two | {"decoder_vocab_size": None}
    assert (source_vocab_size(alike), target_vocab_size(alike)) == (56, 56)
    for shared in (config, two | {"model_type": "bart"}):
        assert (source_vocab_size(shared), target_vocab_size(shared)) == (None, 56)
