"""FLAC, MP3 and Ogg Vorbis: samples, announcements that are not true, damage, and processes."""

from __future__ import annotations

import importlib.util
import random
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlx_parallm.media.audio import coded, limits
from mlx_parallm.media.audio.decode import decode_audio, seconds_of
from mlx_parallm.media.audio.limits import AudioForm, AudioLimits
from mlx_parallm.media.child import process
from mlx_parallm.types.errors import InvalidRequestError, OverloadedError
from tests.audio_files import CodedSample, coded_samples

LIMITS = AudioLimits(max_seconds=10.0)
SAMPLES = coded_samples()
FLAC, MP3, VORBIS = (SAMPLES[name].file for name in ("flac_44k", "mp3_48k", "vorbis_48k"))
UNCOUNTED = SAMPLES["mp3_44k_without_a_count"].file
#: ``ROUNDING``: that of the samples of 16 bits.
ROUNDING = 2 / 32767


def decoded(file: bytes, rate: int) -> np.ndarray:
    return decode_audio(file, LIMITS, rate)


def tag(size: int) -> bytes:
    parts = [size >> shift & 0x7F for shift in (21, 14, 7, 0)]
    return b"ID3\x04\0\0" + bytes(parts) + bytes(size)


@pytest.mark.parametrize("name", list(SAMPLES))
def test_samples_are_those_of_ffmpeg(name: str) -> None:
    sample = SAMPLES[name]
    made = decoded(sample.file, sample.rate)
    # FFmpeg keeps what an encoder puts behind the end, and leaves out a part of the last packet.
    both = min(len(made), len(sample.samples))
    assert both >= 0.08 * sample.rate
    assert np.abs(made[:both] - sample.samples[:both]).max() <= ROUNDING
    length = len(made) / sample.rate
    assert length <= seconds_of(sample.file, LIMITS) < length + 0.2


def test_tags_are_skipped_whatever_their_size() -> None:
    for file, rate in ((MP3, 48000), (FLAC, 44100)):
        tagged = tag(10) + tag(3_000_000) + file
        np.testing.assert_array_equal(decoded(tagged, rate), decoded(file, rate))
    np.testing.assert_array_equal(decoded(MP3 + b"TAG" + bytes(125), 48000), decoded(MP3, 48000))
    with pytest.raises(InvalidRequestError, match="no frames"):
        decoded(tag(1000)[:500], 48000)


def test_garbage_between_frames_is_skipped() -> None:
    noise = random.Random(1).randbytes(5000)
    made = decoded(noise.join((b"\xff\xfb\x90", UNCOUNTED, b"")), 44100)
    assert len(made) == len(decoded(UNCOUNTED, 44100))


def test_joined_files_are_heard_to_the_end() -> None:
    # The first one says how many frames it has.
    assert len(decoded(MP3 + MP3 + MP3, 48000)) > 2.8 * len(decoded(MP3, 48000))


def flac_of(num_frames: int) -> bytes:
    fields = int.from_bytes(FLAC[18:26], "big") >> 36 << 36
    return FLAC[:18] + (fields | num_frames).to_bytes(8, "big") + FLAC[26:]


def test_a_flac_file_need_not_say_how_long_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    np.testing.assert_array_equal(decoded(flac_of(0), 44100), decoded(FLAC, 44100))
    assert seconds_of(flac_of(0), LIMITS) == LIMITS.max_seconds
    for rounding, is_taken in ((0.2, True), (0.0, False)):
        monkeypatch.setattr(limits, "ROUNDING_S", rounding)
        if is_taken:
            decode_audio(flac_of(0), AudioLimits(max_seconds=0.05), 44100)
            assert seconds_of(FLAC, AudioLimits(max_seconds=0.05)) == 0.05
            continue
        with pytest.raises(InvalidRequestError, match=r"at most 0.05 s"):
            decode_audio(flac_of(0), AudioLimits(max_seconds=0.05), 44100)


def test_the_samples_of_all_channels_are_bounded() -> None:
    # Many channels at a high rate take no longer to hear, but to decode.
    num_frames = 192_000 * 5
    form = AudioForm(192_000, 8, num_frames)
    with pytest.raises(InvalidRequestError, match="7680000 samples in its channels"):
        LIMITS.check(form)
    assert LIMITS.most_frames(replace(form, num_frames=None)) < num_frames


def test_nothing_is_decoded_behind_the_end_that_a_file_says() -> None:
    assert len(decoded(flac_of(100), 44100)) == 100
    place = VORBIS.rindex(b"OggS")
    short = VORBIS[: place + 6] + struct.pack("<q", 1000) + VORBIS[place + 14 :]
    assert seconds_of(short, LIMITS) == 1000 / 48000


def page(file: bytes, flags: int, position: int) -> bytes:
    """Return a file whose last page has other fields."""
    place = file.rindex(b"OggS")
    return file[: place + 5] + struct.pack("<Bq", flags, position) + file[place + 14 :]


def channels_of(count: int, rate: int) -> bytes:
    place = VORBIS.index(b"\x01vorbis") + 11
    return VORBIS[:place] + struct.pack("<BI", count, rate) + VORBIS[place + 5 :]


def flac_at(rate: int) -> bytes:
    fields = int.from_bytes(FLAC[18:26], "big") & (1 << 44) - 1
    return FLAC[:18] + (fields | rate << 44).to_bytes(8, "big") + FLAC[26:]


REFUSED = {
    "flac, cut": (FLAC[:-2000], "truncated"),
    "flac, one sample more": (flac_of(4411), "truncated"),
    "flac, header alone": (FLAC[:42], "truncated"),
    "flac, half a header": (FLAC[:30], "truncated"),
    "flac, 300 hours": (flac_of((1 << 36) - 1), "at most 10 s"),
    "flac, rate 0": (flac_at(0), "0 samples per second"),
    "flac, 655 kHz": (flac_at(655_350), "655350"),
    "mp3, cut": (MP3[:700], "truncated"),
    "mp3, no frames": (b"\xff\xfb\x90\0" + bytes(5000), "no frames"),
    "mp3, a tag alone": (tag(500), "no frames"),
    "mp3, headers alone": (b"\xff\xfb\x10" * 1_000_000, "too much between"),
    "mp3, 20 s": (UNCOUNTED * 160, "at most 10 s"),
    "mp3, all ones": (b"\xff" * 1_000_000, "no frames"),
    "vorbis, cut": (VORBIS[:-300], "truncated"),
    "vorbis, headers alone": (VORBIS[: VORBIS.index(b"\x05vorbis")], "truncated"),
    "vorbis, half a page": (VORBIS[:50], "truncated"),
    "vorbis, more than there is": (page(VORBIS, 4, 200_000), "truncated"),
    "vorbis, 10 hours": (page(VORBIS, 4, 36_000 * 48_000), "at most 10 s"),
    "vorbis, less than nothing": (page(VORBIS, 4, -5), "no samples"),
    "vorbis, two files": (VORBIS + VORBIS, "several streams"),
    "vorbis, 0 channels": (channels_of(0, 48000), "0 channels"),
    "vorbis, 32 channels": (channels_of(32, 48000), "32 channels"),
    "vorbis, rate 0": (channels_of(2, 0), "0 samples per second"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_damaged_or_lies_is_refused(name: str) -> None:
    file, why = REFUSED[name]
    with pytest.raises(InvalidRequestError, match=why):
        decoded(file, 16000)


def test_the_refusal_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if "mini" in name else known(name)
    )
    with pytest.raises(InvalidRequestError, match=r"mlx-parallm\[audio\]"):
        decoded(MP3, 48000)


@pytest.mark.parametrize(
    ("program", "kind", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", InvalidRequestError, "damaged"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGXCPU)", InvalidRequestError, "damaged"),
        ("import os; os._exit(3)", InvalidRequestError, "damaged"),
        ("raise MemoryError", InvalidRequestError, "damaged"),
        ("import signal; signal.raise_signal(signal.SIGALRM)", OverloadedError, "try again"),
        ("import nothing_that_is_there", RuntimeError, "nothing_that_is_there"),
    ],
)
def test_a_process_that_ends_ends_its_file_alone(
    program: str,
    kind: type[Exception],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "audio.py").write_text(program)
    monkeypatch.setattr(process, "READERS", tmp_path)
    with pytest.raises(kind, match=words):
        decoded(MP3, 48000)
    monkeypatch.undo()
    assert len(decoded(MP3, 48000)) == 4800


def test_a_file_that_makes_the_decoder_crash_is_refused() -> None:
    # The decoder of miniaudio 1.71 is ended by a signal while it reads the codebooks.
    with pytest.raises(InvalidRequestError, match="truncated or damaged"):
        decoded(VORBIS[:122] + b"\x7f" + VORBIS[123:], 16000)


def test_time_without_end_is_not_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "audio.py").write_text("import time; time.sleep(1e6)")
    monkeypatch.setattr(process, "READERS", tmp_path)
    monkeypatch.setattr(coded, "WALL_S", 0.1)
    with pytest.raises(OverloadedError, match="try again"):
        decoded(MP3, 48000)


def changed(sample: CodedSample, chance: random.Random) -> bytes:
    """Return a file with some bytes changed, left out or put in, or its end cut off."""
    file = bytearray(sample.file)
    if chance.random() < 0.15:
        return bytes(file[: chance.randrange(len(file))])
    # Headers are where a change does most.
    end = chance.choice([64, 300, len(file)])
    for _ in range(chance.choice([1, 4, 32])):
        place = chance.randrange(end)
        kind = chance.random()
        if kind < 0.7:
            file[place : place + 1] = bytes(
                [chance.choice([0, 0x7F, 0x80, 0xFF, chance.getrandbits(8)])]
            )
        elif kind < 0.85:
            del file[place : place + chance.randrange(1, 40)]
        else:
            file[place:place] = chance.randbytes(chance.randrange(1, 20))
        end = min(end, len(file))
    return bytes(file)


def is_refused(file: bytes, *, has_samples: bool) -> bool:
    """Return True if a file is refused; any other error fails the test."""
    try:
        decoded(file, 16000) if has_samples else seconds_of(file, LIMITS)
    except InvalidRequestError:
        return True
    return False


@pytest.mark.parametrize("name", list(SAMPLES))
def test_the_form_of_changed_files_is_read_or_refused(name: str) -> None:
    chance = random.Random(name)
    files = [changed(SAMPLES[name], chance) for _ in range(500)]
    num_refused = sum(is_refused(file, has_samples=False) for file in files)
    assert 0 < num_refused < len(files)


@pytest.mark.parametrize("name", list(SAMPLES))
def test_changed_files_are_decoded_or_refused(name: str) -> None:
    chance = random.Random(name)
    for _ in range(5):
        is_refused(changed(SAMPLES[name], chance), has_samples=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SAMPLES))
def test_many_changed_files_are_decoded_or_refused(name: str) -> None:
    chance = random.Random(f"many {name}")
    for _ in range(100):
        is_refused(changed(SAMPLES[name], chance), has_samples=True)
