"""A writer of small audio files, and of their samples as FFmpeg decodes them.

Run it by hand, where the program ffmpeg has libmp3lame and libvorbis, as in Debian's package:

    python3 -m scripts.golden_audio

The result is tests/golden/audio.json: by name a file in base64, its rate and channels, and the
mean of its channels as FFmpeg has it, 16 bits in base64.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from base64 import b64encode
from pathlib import Path
from typing import NamedTuple

import numpy as np

FILE = Path(__file__).parent.parent / "tests" / "golden" / "audio.json"
SECONDS = 0.1


class Sample(NamedTuple):
    """A file.

    Attributes:
        rate: samples of a channel per second.
        num_channels: the channels.
        options: FFmpeg's, of the encoder.
    """

    rate: int
    num_channels: int
    options: str


LAME, VORBIS = "-c:a libmp3lame -f mp3", "-c:a libvorbis -f ogg"
SAMPLES = {
    "flac_8k": Sample(8000, 1, "-c:a flac -f flac"),
    "flac_24_bits_48k": Sample(48000, 2, "-c:a flac -sample_fmt s32 -f flac"),
    "flac_44k": Sample(44100, 2, "-c:a flac -f flac"),
    "mp3_8k": Sample(8000, 1, LAME),
    "mp3_16k": Sample(16000, 1, f"{LAME} -b:a 32k"),
    "mp3_22k": Sample(22050, 2, f"{LAME} -q:a 5"),
    "mp3_44k_without_a_count": Sample(44100, 2, f"{LAME} -q:a 5 -write_xing 0"),
    "mp3_48k": Sample(48000, 2, f"{LAME} -b:a 64k"),
    "vorbis_8k": Sample(8000, 1, VORBIS),
    "vorbis_22k": Sample(22050, 1, VORBIS),
    "vorbis_48k": Sample(48000, 2, VORBIS),
}


def signal(rate: int, num_channels: int) -> bytes:
    """Return swept tones, one of each channel, float32."""
    times = np.arange(int(SECONDS * rate)) / rate
    tones = [
        0.4 * np.sin(2 * np.pi * (200 + 150 * channel + 800 * times) * times)
        for channel in range(num_channels)
    ]
    return np.stack(tones, axis=1).astype("<f4").tobytes()


def converted(data: bytes, source: str, target: str) -> bytes:
    """Return what FFmpeg makes of data, with options of what it reads and writes."""
    command = ["ffmpeg", "-loglevel", "error", "-bitexact", *source.split(), "-i", "pipe:0"]
    with tempfile.NamedTemporaryFile() as written:
        # It goes back to write how many samples there are, which a pipe cannot do.
        command += ["-bitexact", *target.split(), "-y", written.name]
        subprocess.run(command, input=data, check=True, capture_output=True)
        return Path(written.name).read_bytes()


def main() -> None:
    """Write the file."""
    cases: dict[str, object] = {}
    for name, (rate, num_channels, options) in SAMPLES.items():
        raw = f"-f f32le -ar {rate} -ac {num_channels}"
        file = converted(signal(rate, num_channels), raw, options)
        heard = np.frombuffer(converted(file, "", "-f f32le"), "<f4").reshape(-1, num_channels)
        mono = np.round(heard.mean(axis=1) * 32767).astype("<i2")
        cases[name] = {
            "rate": rate,
            "num_channels": num_channels,
            "file": b64encode(file).decode(),
            "samples": b64encode(mono.tobytes()).decode(),
        }
    FILE.write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()
