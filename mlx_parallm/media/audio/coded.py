"""FLAC, MP3 and Ogg Vorbis files, decoded by processes of their own."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mlx_parallm.media.audio.containers import read_flac, read_vorbis
from mlx_parallm.media.audio.limits import AudioForm, AudioLimits
from mlx_parallm.media.audio.mp3 import read_mp3
from mlx_parallm.media.child.audio import DAMAGED
from mlx_parallm.media.child.process import (
    OUT_OF_TIME,
    command,
    header_of,
    is_ended_by_file,
)
from mlx_parallm.types.errors import InvalidRequestError, OverloadedError

EXTRA = "miniaudio"
# BATCH_BYTES: bytes of samples that are read from a process at once, about.
BATCH_BYTES = 1 << 18
# CPU_S, WALL_S: most seconds with the processor, and altogether; SHARE: and for each second of the
# longest recording. An hour of stereo at 48 kHz takes 3 s.
CPU_S, WALL_S, SHARE = 10, 60.0, 1 / 100
# LOGGED: characters of a process's problems that are logged.
LOGGED = 2000


@dataclass(frozen=True, slots=True)
class CodedFile:
    """A file, not decoded yet.

    Attributes:
        kind: "flac", "mp3" or "vorbis".
        form: of its samples.
        data: parts of the file, one after the other: what is not decoded is left out.
        limits: of its form.
    """

    kind: str
    form: AudioForm
    data: Sequence[memoryview]
    limits: AudioLimits

    @property
    def num_tolerated(self) -> int:
        """Return how many samples of a channel may be missing: decoders drop some at the ends."""
        return 0 if self.kind == "flac" else self.form.rate // 2

    def mono(self) -> Iterator[np.ndarray]:
        """Yield the samples, float32 from -1 to 1, channels averaged, part by part.

        Raises:
            InvalidRequestError: the file is damaged, or costs too much.
            OverloadedError: there was no time.
        """
        form = self.form
        header = header_of(
            sum(map(len, self.data)),
            kind=self.kind,
            num_channels=form.num_channels,
            rate=form.rate,
            most_frames=self.limits.most_frames(form),
        )
        with _started(self.limits.max_seconds) as child:
            try:
                _send(child, header, self.data)
                yield from _parts(child, form.num_channels)
                self._check(child)
            finally:
                child.kill()

    def _check(self, child: subprocess.Popen[bytes]) -> None:
        problems = child.stderr.read() if child.stderr else b""
        exit_code = child.wait()
        if exit_code == DAMAGED or is_ended_by_file(exit_code):
            raise InvalidRequestError(f"The {self.kind.upper()} file is truncated or damaged.")
        if exit_code == OUT_OF_TIME:
            raise OverloadedError("There was no time to decode the audio file; try again.")
        if exit_code:
            shown = problems.decode(errors="replace")[-LOGGED:]
            raise RuntimeError(f"The decoder of audio files ended with {exit_code}: {shown}")


def open_coded(file: bytes, start: int, kind: str, limits: AudioLimits) -> CodedFile:
    """Return a file whose form is within limits.

    Args:
        file: its bytes.
        start: where it begins, behind tags.
        kind: "flac", "mp3" or "vorbis".
        limits: of its form.

    Raises:
        InvalidRequestError: it is damaged or beyond the limits, or a package is not installed.
    """
    if importlib.util.find_spec(EXTRA) is None:
        raise InvalidRequestError(
            f"This server reads WAV alone; {kind.upper()} needs the package {EXTRA} there "
            "(pip install 'mlx-parallm[audio]')."
        )
    data = memoryview(file)
    if kind == "flac":
        form, parts = read_flac(file, start), [data[start:]]
    elif kind == "vorbis":
        form, end = read_vorbis(file, start)
        parts = [data[start:end]]
    else:
        form, parts = read_mp3(file, start, limits)
    limits.check(form)
    return CodedFile(kind, form, parts, limits)


def _started(max_seconds: float) -> subprocess.Popen[bytes]:
    more_s, pipe = max_seconds * SHARE, subprocess.PIPE
    try:
        return subprocess.Popen(
            command("audio", int(CPU_S + more_s), WALL_S + more_s),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
        )
    except OSError as problem:
        raise OverloadedError("No process could be started for the audio file.") from problem


def _send(child: subprocess.Popen[bytes], header: bytes, data: Sequence[memoryview]) -> None:
    """Give a process its file; its exit code says why if it does not take it."""
    if child.stdin is None:
        return
    with contextlib.suppress(BrokenPipeError):
        child.stdin.writelines([header, *data])
    with contextlib.suppress(BrokenPipeError):
        child.stdin.close()


def _parts(child: subprocess.Popen[bytes], num_channels: int) -> Iterator[np.ndarray]:
    """Yield the samples that a process answers, channels averaged."""
    size = num_channels * 4
    while child.stdout and (part := child.stdout.read(BATCH_BYTES // size * size)):
        # A process that crashes may end within a frame.
        whole = part[: len(part) // size * size]
        samples = np.frombuffer(whole, np.float32).reshape(-1, num_channels)
        yield samples.mean(axis=1, dtype=np.float32)
