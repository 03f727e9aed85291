"""Inputs of a model that generates besides tokens: what they are, and what they take."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum


class InputKind(StrEnum):
    """The kind of an input, which decides how the worker computes its product."""

    #: Rows that stand in place of the embeddings of tokens.
    PROMPT_EMBEDS = "prompt_embeds"
    #: An image, of which the model's tower computes such rows.
    IMAGE = "image"
    #: What the encoder of an encoder-decoder reads; its product is cross-attention KV.
    SOURCE = "source"


#: ``TOKEN_IDS``: the array of an image with the token ids of its rows, int32 ``[rows]``;
#: ``FEATURE`` where a row is one of the tower's. The array of a source text with its tokens.
TOKEN_IDS = "token_ids"
FEATURE = -1
#: ``LOG_MEL``: the array of a source of audio with its features, float32 ``[frames, mels]``.
LOG_MEL = "log_mel"
#: ``POSITIONS``: the array of an input with the position ids of its rows on each axis, counted from
#: its first row's, int32 ``[rows, axes]``.
POSITIONS = "positions"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class HostArray:
    """Numbers in host memory, in row order.

    Attributes:
        dtype: NumPy's name of their dtype, such as "float32".
        shape: the lengths of the axes.
        data: their bytes, in the byte order of this machine.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Span:
    """The prompt positions ``start`` to ``stop - 1`` that an input's rows take."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def overlaps(self, start: int, stop: int) -> bool:
        """Return True if it has a position in ``start`` to ``stop - 1``."""
        return self.start < stop and start < self.stop


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """One input of a request besides its tokens.

    Attributes:
        kind: what it is.
        content: digest of what its product is computed from; equal digests give equal products.
        arrays: what the worker computes the product from, by name; they must not change.
        nbytes: size of the product, in bytes.
        cost: tokens of a step's budget that computing the product takes; 0 if it only copies.
        span: the prompt positions of its rows; None for an input that has no rows in the prompt and
            that every row needs, such as a source text.
        may_cut: True if a step may run a part of its rows; False if all must be in one step, as
            where rows attend to later ones.
        num_positions: the position ids that its rows take, where these are not their places: then
            the array ``POSITIONS`` has them, and what follows begins so many behind its first row
            (M-RoPE, arXiv:2409.12191). None: as many as rows.
        shape_key: inputs of a kind with equal keys can be computed together: their arrays have
            equal shapes, or are texts, which need none. None if it is computed alone.
        num_kv_tokens: the positions of KV that the product takes in blocks of the pool; 0 for
            features, which the worker keeps in a slot.
    """

    kind: InputKind
    content: str
    arrays: Mapping[str, HostArray] = field(repr=False, compare=False)
    nbytes: int
    cost: int = 0
    span: Span | None = None
    may_cut: bool = True
    num_positions: int | None = None
    shape_key: str | None = None
    num_kv_tokens: int = 0


def source_of(token_ids: Sequence[int]) -> ModelInput:
    """Return a source text of these tokens, at least one."""
    data = array("i", token_ids).tobytes()
    return ModelInput(
        kind=InputKind.SOURCE,
        content=hashlib.blake2b(data, digest_size=32).hexdigest(),
        arrays={TOKEN_IDS: HostArray("int32", (len(token_ids),), data)},
        nbytes=0,
        cost=len(token_ids),
        shape_key=TOKEN_IDS,
        num_kv_tokens=len(token_ids),
    )


def audio_of(features: HostArray, content: str) -> ModelInput:
    """Return a source of audio.

    Args:
        features: float32 ``[2 S, mels]``, of which the encoder makes S positions.
        content: digest of what they were computed from.
    """
    num_frames, num_mels = features.shape
    return ModelInput(
        kind=InputKind.SOURCE,
        content=content,
        arrays={LOG_MEL: features},
        nbytes=0,
        cost=num_frames // 2,
        shape_key=f"{LOG_MEL} {num_frames} {num_mels}",
        num_kv_tokens=num_frames // 2,
    )


def tokens_of(source: ModelInput) -> Sequence[int]:
    """Return the tokens of a source text; none if it is no text."""
    token_ids = source.arrays.get(TOKEN_IDS)
    return () if token_ids is None else memoryview(token_ids.data).cast("i")


def num_source_tokens(inputs: Iterable[ModelInput]) -> int:
    """Return the number of positions that sources have."""
    return sum(each.num_kv_tokens for each in inputs)


def sources_of(inputs: Iterable[ModelInput]) -> list[ModelInput]:
    """Return those inputs that are texts of an encoder."""
    return [each for each in inputs if each.kind is InputKind.SOURCE and TOKEN_IDS in each.arrays]


def source_ids(source: ModelInput) -> tuple[int, ...]:
    """Return the tokens of a source text."""
    return tuple(array("i", source.arrays[TOKEN_IDS].data))


def without_arrays(source: ModelInput) -> ModelInput:
    """Return an input without its arrays: its content says which one it is."""
    return replace(source, arrays={})


def num_image_tokens(inputs: Iterable[ModelInput]) -> int:
    """Return the number of prompt positions that images take."""
    spans = (each.span for each in inputs if each.kind is InputKind.IMAGE)
    return sum(len(span) for span in spans if span is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRows:
    """Rows of a computed input that a step runs.

    Rows ``first_row`` to ``first_row + num_rows - 1`` of the product in ``slot`` stand in place of
    the embeddings of the sequence's ``token_ids[offset : offset + num_rows]``.
    """

    slot: int
    first_row: int
    num_rows: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePlace:
    """Where the KV of a source goes, and what it is computed with.

    Attributes:
        block_table: ids of the KV blocks that hold its positions.
        adapter_slot: slot of the adapter, which stays there while the run lasts; 0 is none.
        adapter: the adapter's digest; None for none.
    """

    block_table: tuple[int, ...]
    adapter_slot: int = 0
    adapter: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputStages:
    """Stages of the computation of some inputs together, their run.

    Attributes:
        run: number of the run, unique in its engine.
        slots: where the products go.
        begun: the input of each slot if the run begins; empty if it goes on.
        num_stages: how many stages are computed.
        is_last: True if none is left then.
        tokens: their share of the inputs' cost.
        places: where the KV of each input goes, if the run begins and its products are KV.
    """

    run: int
    slots: tuple[int, ...]
    begun: tuple[ModelInput, ...] = ()
    places: tuple[SourcePlace, ...] = ()
    num_stages: int
    is_last: bool
    tokens: float
