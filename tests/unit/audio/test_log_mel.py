"""Log-mel features are those of transformers' extractor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from mlx_parallm.audio.log_mel import FRAMES_PER_S, SAMPLE_RATE, LogMel
from mlx_parallm.audio.recording import bytes_of, recorded

WINDOW = 30 * FRAMES_PER_S
RANDOM = np.random.RandomState(1)


def tone(seconds: float) -> np.ndarray:
    times = np.arange(int(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    swept = np.sin(2 * np.pi * (200 + 300 * times) * times)
    return (0.3 * swept + 0.01 * RANDOM.standard_normal(len(times))).astype(np.float32)


#: ``CLIPS``: samples, and the seconds of the features.
CLIPS = {
    "nothing": np.zeros(0, np.float32),
    "a sample": np.ones(1, np.float32),
    "less than a frame": tone(0.01),
    "a frame's half": RANDOM.standard_normal(200).astype(np.float32),
    "one second": tone(1.0),
    "one sample less than a frame": tone(0.025)[:-1],
    "a frame": tone(0.025),
    "odd": tone(7.12345),
    "almost all": tone(29.99),
    "all": tone(30.0),
    "silence": np.zeros(SAMPLE_RATE, np.float32),
    "loud": np.clip(3 * RANDOM.standard_normal(SAMPLE_RATE), -1, 1).astype(np.float32),
}


@pytest.mark.parametrize("num_mels", [80, 128])
@pytest.mark.parametrize("name", list(CLIPS))
def test_a_window_has_the_features_of_transformers(name: str, num_mels: int) -> None:
    clip = CLIPS[name]
    extractor: Any = WhisperFeatureExtractor(feature_size=num_mels)
    whole = np.zeros(30 * SAMPLE_RATE, np.float32)
    whole[: len(clip)] = clip
    expected = extractor(whole, sampling_rate=SAMPLE_RATE, return_tensors="np").input_features[0].T
    assert np.abs(LogMel(num_mels).features(clip, WINDOW) - expected).max() <= 1e-5


@pytest.mark.parametrize("num_mels", [80, 128])
@pytest.mark.parametrize("num_samples", [30 * 16000 + 1, 31 * 16000, 90 * 16000, 72 * 16000 + 77])
def test_a_long_recording_has_the_features_of_transformers(num_samples: int, num_mels: int) -> None:
    clip = np.concatenate([tone(29.0), np.zeros(5000, np.float32), tone(61.0)])[:num_samples]
    extractor: Any = WhisperFeatureExtractor(feature_size=num_mels)
    settings = {"truncation": False, "padding": "longest", "return_attention_mask": True}
    read = extractor(clip, sampling_rate=SAMPLE_RATE, return_tensors="np", **settings)
    expected = read.input_features[0].T
    recording = recorded(clip, num_mels)
    assert recording.num_frames == len(expected) == len(recording.features)
    assert np.abs(recording.features - expected).max() <= 1e-5


def test_equal_recordings_alone_have_equal_windows() -> None:
    clip = tone(31.0)
    first, again, other = (recorded(samples, 80) for samples in (clip, clip.copy(), clip[1:]))
    assert first.window(0).content == again.window(0).content
    contents = [each.window(at).content for each in (first, other) for at in (0, 3000)]
    assert len(set(contents)) == 4


def test_bytes_are_those_of_samples_and_features() -> None:
    for samples in (tone(1.0), tone(95.3)):
        recording = recorded(samples, 80)
        held = samples.nbytes + recording.features.nbytes
        assert held <= bytes_of(recording.seconds, 80) <= held + 4 * 81
