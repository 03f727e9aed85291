"""The sizes of results, and inputs in parts whose results are not too large."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mlx_parallm.types.pooling import EncodeInput, EncoderInfo

# PART_NUMBERS: most numbers of results that wait to be written; a vocabulary has some 50,000.
PART_NUMBERS = 16_000_000


def num_numbers(encoded: EncodeInput, info: EncoderInfo) -> int:
    """Return how many numbers an input's result has; see ``Task``."""
    if encoded.top_k:
        return len(encoded.places) * 2 * encoded.top_k
    if encoded.places:
        return len(encoded.places) * (len(encoded.candidates) or info.vocab_size)
    sizes = {
        "token_embed": len(encoded.token_ids) * info.dims,
        "token_classify": len(encoded.token_ids) * len(info.labels),
        "classify": len(info.labels),
        "sparse": info.vocab_size,
    }
    return sizes.get(encoded.task, info.dims)


def in_parts(inputs: Sequence[EncodeInput], info: EncoderInfo) -> Iterator[Sequence[EncodeInput]]:
    """Yield inputs in parts whose results are small enough to wait for each other."""
    begin = size = 0
    for place, each in enumerate(inputs):
        more = num_numbers(each, info)
        if place > begin and size + more > PART_NUMBERS:
            yield inputs[begin:place]
            begin, size = place, 0
        size += more
    if inputs[begin:]:
        yield inputs[begin:]
