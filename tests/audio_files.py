"""Audio files: WAV files that tests make, and coded ones that FFmpeg made."""

from __future__ import annotations

import json
import struct
from base64 import b64decode
from pathlib import Path
from typing import NamedTuple

import numpy as np

GOLDEN = Path(__file__).parent / "golden" / "audio.json"
RATE = 16000


class CodedSample(NamedTuple):
    """A coded file, its form, and its samples by FFmpeg, float32, channels averaged."""

    file: bytes
    rate: int
    num_channels: int
    samples: np.ndarray


def coded_samples() -> dict[str, CodedSample]:
    """Return the files of scripts/golden_audio.py by name, which begins with the kind."""
    return {
        name: CodedSample(
            b64decode(case["file"]),
            case["rate"],
            case["num_channels"],
            np.frombuffer(b64decode(case["samples"]), "<i2") / np.float32(32767),
        )
        for name, case in json.loads(GOLDEN.read_text()).items()
    }


def coded(samples: np.ndarray, kind: str) -> bytes:
    if kind == "u1":
        return np.round(samples * 127 + 128).astype(np.uint8).tobytes()
    if kind == "i3":
        whole = np.round(samples.astype(np.float64) * (2**23 - 1)).astype("<i4")
        return whole.view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
    if kind.startswith("<i"):
        most = 2 ** (8 * int(kind[-1]) - 1) - 1
        return np.round(samples.astype(np.float64) * most).astype(kind).tobytes()
    return samples.astype(kind).tobytes()


def wav(
    content: bytes,
    *,
    tag: int = 1,
    bits: int = 16,
    channels: int = 1,
    rate: int = RATE,
    is_extensible: bool = False,
    size: int | None = None,
    before: bytes = b"",
) -> bytes:
    block = channels * bits // 8
    fields = struct.pack(
        "<HHIIHH", 0xFFFE if is_extensible else tag, channels, rate, rate * block, block, bits
    )
    if is_extensible:
        fields += struct.pack("<HHIH14s", 22, bits, 0, tag, b"\0" * 14)
    chunks = b"fmt " + struct.pack("<I", len(fields)) + fields + before
    chunks += b"data" + struct.pack("<I", len(content) if size is None else size) + content
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def noise(seconds: float, seed: int = 0) -> np.ndarray:
    """Return float32 ``[n]`` at ``RATE``, whose loudness changes, so that windows differ."""
    numbers = np.random.RandomState(seed).standard_normal(round(seconds * RATE))
    loudness = 0.1 * (1.1 + np.sin(np.arange(len(numbers)) / (700 + 130 * seed)))
    return np.clip(numbers * loudness, -1, 1).astype(np.float32)


def clip(seconds: float, seed: int = 0) -> bytes:
    """Return the WAV file of a noise."""
    return wav(coded(noise(seconds, seed), "<i2"))
