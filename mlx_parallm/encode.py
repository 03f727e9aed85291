"""What travels between the stages where texts become vectors instead of more text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeRequest:
    """Inputs of one model that are answered together.

    Attributes:
        request_id: chosen by the caller, unique among those in flight.
        model: the model's first name.
        inputs: token ids with the special ones; at least one input, of at least one token each.
    """

    request_id: str
    model: str
    inputs: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInfo:
    """What the rest of the server must know about a loaded encoder.

    Attributes:
        architecture: ``model_type`` of its config.
        vocab_size: rows of the embedding table: ids from it on are refused at the door.
        max_model_len: longest input in tokens, special ones included.
        dims: numbers of a vector.
        dtype: what it computes in.
        weight_bytes: size of the weights.
        normalizes: whether its vectors have length 1.
        shorter_dims: lengths that its vectors may be cut to; None for any, empty for none.
    """

    architecture: str
    vocab_size: int
    max_model_len: int
    dims: int
    dtype: str
    weight_bytes: int
    normalizes: bool = False
    shorter_dims: tuple[int, ...] | None = ()


class Encoder(Protocol):
    """Runs a model over a batch of inputs. Everything happens on the engine thread."""

    @property
    def info(self) -> EncoderInfo:
        """Facts about the loaded model."""
        ...

    def embed(self, inputs: Sequence[tuple[int, ...]]) -> np.ndarray:
        """A vector for each input, float32 ``[len(inputs), dims]``."""
        ...
