"""Long recordings in windows of 30 s: where the next one begins, and which texts are kept.

As in transformers (``generation_whisper.py``) and section 4.5 of arXiv:2212.04356: a window ends
where the model's last pair of timestamps says that a segment does, and the next one begins there.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from mlx_parallm.audio.log_mel import FRAMES_PER_S

#: ``WINDOW_FRAMES``: frames of a window.
WINDOW_FRAMES = 30 * FRAMES_PER_S
#: ``STEP_FRAMES``, ``STEP_S``: frames, and seconds, from one timestamp to the next.
STEP_FRAMES = 2
STEP_S = STEP_FRAMES / FRAMES_PER_S


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a recording and its tokens.

    Attributes:
        start: seconds from the recording's beginning.
        end: likewise.
        token_ids: the tokens, timestamps included.
    """

    start: float
    end: float
    token_ids: tuple[int, ...]


def segments_of(
    token_ids: Sequence[int], first_frame: int, num_frames: int, timestamp_begin: int
) -> tuple[list[Segment], int]:
    """Return the segments of a window, and by how many frames the next window is later.

    Args:
        token_ids: the model's output, without end token.
        first_frame: of the window.
        num_frames: those that the recording has in it.
        timestamp_begin: the token of the timestamp 0; all later ones are timestamps.
    """
    is_stamp = [token_id >= timestamp_begin for token_id in token_ids]
    # A pair of timestamps ends a segment and begins the next one.
    cuts = [place for place, pair in enumerate(pairwise(is_stamp), 1) if all(pair)]
    offset_s = first_frame / FRAMES_PER_S
    if not cuts:
        stamps = [each for each in token_ids if each >= timestamp_begin]
        last = num_frames // STEP_FRAMES
        if stamps and stamps[-1] != timestamp_begin:
            last = stamps[-1] - timestamp_begin
        return [Segment(offset_s, offset_s + last * STEP_S, tuple(token_ids))], num_frames
    ends_once = is_stamp[-2:] == [False, True]
    # The end of the last whole segment; what is behind it is heard again.
    if ends_once:
        cuts.append(len(token_ids))
    else:
        cuts[-1] += 1
    segments = [
        Segment(
            offset_s + (token_ids[first] - timestamp_begin) * STEP_S,
            offset_s + (token_ids[_end(end, cuts, ends_once)] - timestamp_begin) * STEP_S,
            tuple(token_ids[first:end]),
        )
        for first, end in pairwise([0, *cuts])
    ]
    if ends_once:
        # There is no speech behind a single timestamp.
        return segments, num_frames
    return segments, (token_ids[cuts[-1] - 2] - timestamp_begin) * STEP_FRAMES


def _end(end: int, cuts: Sequence[int], ends_once: bool) -> int:
    """Return the place of the timestamp that ends a segment."""
    return end - 1 if ends_once or end != cuts[-1] else end - 2


def compression_ratio(token_ids: Sequence[int], vocab_size: int) -> float:
    """Return how well tokens are compressed: a text that goes round in circles is, very well."""
    size = int(math.log2(vocab_size) / 8) + 1
    data = b"".join(token_id.to_bytes(size, "little") for token_id in token_ids)
    return len(data) / len(zlib.compress(data))


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Signs of a text that is not what was said; None: the sign does not count.

    Attributes:
        compression_ratio: above it a text repeats itself.
        logprob: below this mean log-probability the model guesses.
        no_speech: above this probability of no speech a guess is dropped.
    """

    compression_ratio: float | None = 1.35
    logprob: float | None = -1.0
    no_speech: float | None = 0.6


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision about a window's text.

    Attributes:
        is_silent: the window has no speech.
        is_doubted: the text is to be chosen anew at a higher temperature.
    """

    is_silent: bool = False
    is_doubted: bool = False


def judged(
    thresholds: Thresholds, *, ratio: float, mean_logprob: float, no_speech: float
) -> Verdict:
    """Return the decision about a text with these signs."""
    is_guess = thresholds.logprob is not None and mean_logprob < thresholds.logprob
    if is_guess and thresholds.no_speech is not None and no_speech > thresholds.no_speech:
        return Verdict(is_silent=True)
    repeats = thresholds.compression_ratio is not None and ratio > thresholds.compression_ratio
    return Verdict(is_doubted=is_guess or repeats)
