"""The results of pooling models. Class and field names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOutput:
    """The vector of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Return the length of the vector."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationOutput:
    """The probability of each label, in the order of the model's labels."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Return the number of labels."""
        return len(self.probs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringOutput:
    """Score of a pair of texts."""

    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingOutput:
    """The array that a model gives for a prompt, float32; ``types.pooling.Task`` has the shapes."""

    data: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRequestOutput(Generic[T]):
    """The result of one prompt or pair.

    Attributes:
        request_id: unique in the process.
        outputs: the result.
        prompt_token_ids: what the model read; empty for a pair.
        finished: True.
    """

    request_id: str
    outputs: T
    prompt_token_ids: tuple[int, ...] = ()
    finished: bool = True


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]
