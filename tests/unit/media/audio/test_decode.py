"""Audio files: forms of WAV, other formats, other rates, damage and limits."""

from __future__ import annotations

import io
import itertools
import struct
import wave
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest

from mlx_parallm.media.audio.decode import _checked, decode_audio, seconds_of
from mlx_parallm.media.audio.limits import AudioForm, AudioLimits
from mlx_parallm.media.audio.resample import resampled
from mlx_parallm.types.errors import InvalidRequestError
from tests.audio_files import RATE, coded, wav

LIMITS = AudioLimits(max_seconds=10.0)
TONE = (0.5 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)).astype(np.float32)
#: ``ROUNDING``: by which samples of each form may differ.
FORMS = {
    "u1": (1, 8, 1 / 128),
    "<i2": (1, 16, 1 / 32768),
    "i3": (1, 24, 1 / 2**23),
    "<i4": (1, 32, 1e-7),
    "<f4": (3, 32, 0.0),
    "<f8": (3, 64, 0.0),
}


@pytest.mark.parametrize("is_extensible", [False, True])
@pytest.mark.parametrize("kind", list(FORMS))
def test_every_form_of_wav_is_read(kind: str, is_extensible: bool) -> None:
    tag, bits, rounding = FORMS[kind]
    file = wav(coded(TONE, kind), tag=tag, bits=bits, is_extensible=is_extensible)
    assert np.abs(decode_audio(file, LIMITS, RATE) - TONE).max() <= 1.5 * rounding
    assert seconds_of(file, LIMITS) == 1.0


def test_a_file_of_the_standard_library_is_read() -> None:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(2)
        writer.setsampwidth(2)
        writer.setframerate(RATE)
        writer.writeframes(coded(np.stack([TONE, -TONE / 2], axis=1).reshape(-1), "<i2"))
    assert np.abs(decode_audio(file.getvalue(), LIMITS, RATE) - TONE / 4).max() < 1e-4


def test_chunks_before_the_samples_are_skipped() -> None:
    odd = b"LIST" + struct.pack("<I", 3) + b"abc\0"
    file = wav(coded(TONE, "<i2"), before=odd)
    assert len(decode_audio(file, LIMITS, RATE)) == RATE


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0x7FFFFFFF, 0, 2 * RATE - 2 * 5])
def test_a_size_that_is_unknown_or_small_counts_as_far_as_the_file_goes(size: int) -> None:
    # ffmpeg writes 0xFFFFFFFF into a pipe.
    samples = decode_audio(wav(coded(TONE, "<i2"), size=size), LIMITS, RATE)
    assert len(samples) == (RATE - 5 if 0 < size < 0x7FFFF000 else RATE)


class Parts(NamedTuple):
    form: AudioForm
    parts: list[np.ndarray]
    num_tolerated: int = 0

    def mono(self) -> Iterator[np.ndarray]:
        yield from self.parts
        raise AssertionError("more is decoded")


def test_nothing_is_decoded_behind_what_a_file_announces() -> None:
    file = Parts(AudioForm(RATE, 1, 1500), [np.ones(1000, np.float32)] * 2)
    assert sum(map(len, _checked(file, 1500, LIMITS))) == 1500


@pytest.mark.parametrize(
    "rate", [8000, 11025, 12000, 22050, 24000, 32000, 44100, 48000, 96000, 44101]
)
def test_a_tone_keeps_its_pitch_and_its_loudness_at_another_rate(rate: int) -> None:
    tone = (0.5 * np.sin(2 * np.pi * 440 * np.arange(rate) / rate)).astype(np.float32)
    made = decode_audio(wav(coded(tone, "<f4"), tag=3, bits=32, rate=rate), LIMITS, RATE)
    assert len(made) == RATE
    edge = 400
    # 44,101 Hz count as 44,100.
    assert np.abs(made - TONE)[edge:-edge].max() < (1e-2 if rate == 44101 else 2e-3)


def tone_of(hz: float, rate: int) -> np.ndarray:
    return np.sin(2 * np.pi * hz * np.arange(rate) / rate).astype(np.float32)


@pytest.mark.parametrize("share", [0.02, 0.25, 0.5, 0.85])
@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
def test_what_both_rates_have_stays(rate: int, share: float) -> None:
    hz = share * min(rate, RATE) / 2
    made = resampled([tone_of(hz, rate)], rate, RATE, rate)
    assert np.abs(made - tone_of(hz, RATE))[800:-800].max() <= 1e-4


@pytest.mark.parametrize(
    ("rate", "hz"), [(22050, 8300), (44100, 8300), (44100, 12000), (48000, 8300), (48000, 12000)]
)
def test_what_the_lower_rate_cannot_have_is_gone(rate: int, hz: float) -> None:
    assert np.abs(resampled([tone_of(hz, rate)], rate, RATE, rate)[800:-800]).max() < 1e-4


@pytest.mark.parametrize("rate", [8000, 44100, 48000])
def test_channels_are_averaged_before_the_rate_changes(rate: int) -> None:
    left = 0.5 * tone_of(440, rate)
    both = np.stack([left, np.zeros_like(left)], axis=1).reshape(-1)
    made = decode_audio(
        wav(coded(both, "<f4"), tag=3, bits=32, channels=2, rate=rate), LIMITS, RATE
    )
    assert np.abs(made - 0.25 * tone_of(440, RATE))[400:-400].max() < 1e-4


def test_a_sample_is_enough_and_silence_is_read() -> None:
    assert len(decode_audio(wav(coded(TONE[:1], "<i2")), LIMITS, RATE)) == 1
    assert not decode_audio(wav(bytes(2 * RATE)), LIMITS, RATE).any()


@pytest.mark.parametrize("rate", [8000, 44100, 48000])
def test_parts_give_the_same_samples_as_the_whole(rate: int) -> None:
    noise = np.random.RandomState(1).standard_normal(rate).astype(np.float32)
    whole = resampled([noise], rate, RATE, rate)
    cuts = [0, 1, 7, 300, 301, rate // 2, rate]
    parts = [noise[first:end] for first, end in itertools.pairwise(cuts)]
    np.testing.assert_allclose(resampled(parts, rate, RATE, 10 * rate), whole, atol=1e-5)


NAN = np.full(4, np.nan, np.float32)
REFUSED = {
    b"": "no audio file",
    b"hello": "no audio file",
    b"PK\x03\x04" + b"\0" * 40: "ZIP",
    b"\0\0\0\x18ftypM4A " + b"\0" * 40: "M4A",
    b"\x1a\x45\xdf\xa3" + b"\0" * 40: "WebM",
    b"OggS" + b"\0" * 24 + b"OpusHead" + b"\0" * 40: "Opus",
    b"RIFF\0\0\0\0WAVE": "truncated",
    wav(b"")[:30]: "truncated",
    wav(b""): "no samples",
    wav(coded(TONE, "<i2"), size=10 * RATE): "truncated",
    wav(coded(TONE, "<i2"))[: RATE // 2]: "truncated",
    wav(b"")[:12] + b"junk\0\0\0\0" * 2000 + wav(coded(TONE, "<i2"))[12:]: "truncated or damaged",
    b"\xff\xf1" + b"\0" * 40: "AAC",
    b"ID3\4\0\0\0\0\0\0" * 200: "no frames",
    wav(coded(TONE, "<i2"))[:44]: "truncated",
    wav(coded(NAN, "<f4"), tag=3, bits=32): "no numbers",
    wav(b"\0" * 64, channels=32): "32 channels",
    wav(b"\0" * 64, channels=0): "0 channels",
    wav(b"\0" * 64, rate=384_000): "384000",
    wav(b"\0" * 64, rate=0): "0 samples",
    wav(b"\0" * 64, tag=7, bits=8): "mu-law",
    wav(b"\0" * 64, tag=99, bits=8): "format 99",
    wav(b"\0" * 64, bits=12): "of 12 bits",
    wav(b"\0" * 640_000, rate=4000): "80.0 s",
    wav(b"\0" * 64)[:12] + wav(b"\0" * 64)[36:]: "before",
}


@pytest.mark.parametrize("data", list(REFUSED))
def test_what_is_no_audio_within_the_limits_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(InvalidRequestError, match=REFUSED[data]):
        decode_audio(data, LIMITS, RATE)
