"""Random sources of encoder-decoders, so that no file has to hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mlx_parallm.types.model_input import (
    LOG_MEL,
    TOKEN_IDS,
    HostArray,
    ModelInput,
    audio_of,
    source_of,
)

#: ``FIRST_ID``: smaller ids are special tokens.
FIRST_ID = 4


def golden_ids(seed: int, length: int, vocab_size: int) -> list[int]:
    """Return token ids of a text, or of a decoder's prompt, which depend on the seed."""
    # RandomState's numbers are promised to stay the same in every version of NumPy.
    return np.random.RandomState(seed).randint(FIRST_ID, vocab_size, length).tolist()


def golden_features(seed: int, positions: int, mels: int) -> np.ndarray:
    """Return features of sound for so many positions: float32 ``[2 * positions, mels]``."""
    numbers = np.random.RandomState(seed).standard_normal((2 * positions, mels))
    return numbers.astype(np.float32)


def golden_samples(seed: int, seconds: float) -> np.ndarray:
    """Return a recording at 16,000 samples per second: tones, noise and silence, float32."""
    draw = np.random.RandomState(seed)
    parts: list[np.ndarray] = []
    while sum(map(len, parts)) < seconds * 16000:
        times = np.arange(draw.randint(2000, 60000)) / 16000
        loudness = draw.choice([0.0, 0.1, 0.5])
        tone = np.sin(2 * np.pi * draw.randint(80, 3000) * times * (1 + draw.rand() * times))
        parts.append(loudness * tone + 0.2 * loudness * draw.standard_normal(len(times)))
    return np.concatenate(parts)[: round(seconds * 16000)].astype(np.float32)


def golden_array(config: Mapping[str, Any], case: Mapping[str, Any]) -> tuple[str, np.ndarray]:
    """Return the name and the numbers of the array that a case's source has.

    Args:
        config: of the model.
        case: one of the golden file's sources.
    """
    seed, length = case["seed"], case["length"]
    if config["model_type"] == "whisper":
        return LOG_MEL, golden_features(seed, length, config["num_mel_bins"])
    ids = golden_ids(seed, length, config["vocab_size"])
    return TOKEN_IDS, np.array(ids, dtype=np.int32)


def golden_source(config: Mapping[str, Any], case: Mapping[str, Any]) -> ModelInput:
    """Return the source of a case as a request has it."""
    name, array = golden_array(config, case)
    if name == TOKEN_IDS:
        return source_of(array.tolist())
    return audio_of(HostArray("float32", array.shape, array.tobytes()), str(case["seed"]))
