"""The forms of FLAC files (RFC 9639) and of Ogg files (RFC 3533) with Vorbis."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from mlx_parallm.media.audio.limits import AudioForm
from mlx_parallm.types.errors import InvalidRequestError

# FLAC_BYTES: the mark, a block's header, and the block STREAMINFO, which is the first.
FLAC_BYTES = 4 + 4 + 34
# PAGE: the header of an Ogg page without its table of sizes. FIRST, LAST: flags of the first and
# the last page of a stream. NO_PACKET: a position where no packet ends.
PAGE = struct.Struct("<4sBBqIIIB")
FIRST, LAST, NO_PACKET = 2, 4, -1
# MARK: the mark of an identification header. VORBIS: it, and its version, channels and rate.
MARK = b"\x01vorbis"
VORBIS = struct.Struct("<7sIBI")
# MOST_PAGES: pages of a file; those of an hour are some 20,000.
MOST_PAGES = 1 << 19


def read_flac(data: bytes, start: int) -> AudioForm:
    """Return the form of a file's samples.

    Raises:
        InvalidRequestError: the file is damaged.
    """
    head = data[start : start + FLAC_BYTES]
    if len(head) < FLAC_BYTES or head[4] & 0x7F:
        raise InvalidRequestError("The FLAC file is truncated or damaged.")
    # 20 bits of a rate, 3 of channels - 1, 5 of bits - 1, 36 of samples.
    fields = int.from_bytes(head[18:26], "big")
    return AudioForm(fields >> 44, (fields >> 41 & 7) + 1, fields & (1 << 36) - 1 or None)


@dataclass(frozen=True, slots=True)
class Page:
    """A page of an Ogg file.

    Attributes:
        flags: see ``FIRST`` and ``LAST``.
        position: samples of a channel up to its end.
        stream: a number of its stream.
        end: where it ends.
    """

    flags: int
    position: int
    stream: int
    end: int


def read_vorbis(data: bytes, start: int) -> tuple[AudioForm, int]:
    """Return the form of a file's samples, and where they end.

    Raises:
        InvalidRequestError: the file is damaged, or has several streams.
    """
    pages = _pages(data, start)
    first = next(pages, None)
    place = data.find(MARK, start)
    if first is None or not 0 <= place <= first.end - VORBIS.size:
        raise InvalidRequestError("The Ogg file is truncated or damaged.")
    _, _, num_channels, rate = VORBIS.unpack_from(data, place)
    last, num_frames = first, 0
    for page in pages:
        if page.stream != first.stream:
            raise InvalidRequestError("The Ogg file has several streams; one is taken.")
        last = page
        num_frames = num_frames if page.position == NO_PACKET else page.position
        if page.flags & LAST:
            break
    if not last.flags & LAST:
        raise InvalidRequestError("The Ogg file is truncated: its last page is not there.")
    behind = data[last.end : last.end + PAGE.size]
    if len(behind) == PAGE.size and behind.startswith(b"OggS") and behind[5] & FIRST:
        raise InvalidRequestError("The Ogg file has several streams; one is taken.")
    return AudioForm(rate, num_channels, max(0, num_frames)), last.end


def _pages(data: bytes, place: int) -> Iterator[Page]:
    """Yield pages up to one that is not whole."""
    for _ in range(MOST_PAGES):
        if len(data) < place + PAGE.size:
            return
        mark, _, flags, position, stream, _, _, num_sizes = PAGE.unpack_from(data, place)
        sizes = data[place + PAGE.size : place + PAGE.size + num_sizes]
        end = place + PAGE.size + num_sizes + sum(sizes)
        if mark != b"OggS" or end > len(data):
            return
        yield Page(flags, position, stream, end)
        place = end
    raise InvalidRequestError(f"The Ogg file has more than {MOST_PAGES} pages.")
