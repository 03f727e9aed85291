"""The body of ``POST /v1/mlm``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    WithJsonSchema,
)

from mlx_parallm.api.pooling.inputs.encode import Reading
from mlx_parallm.api.pooling.inputs.schema import (
    MAX_INPUTS,
    TOKEN_IDS,
    PoolingFields,
    Texts,
    as_ids,
    many,
)
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_list, is_object

MAX_TOP_K = 1000
MAX_WORDS = 10_000

_WORD = {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 0}]}


def _token_ids(value: Any) -> list[list[int]]:
    lists = as_ids(value)
    if lists is None:
        raise ValueError(f"must be token ids, or a list of 1 to {MAX_INPUTS} lists of them")
    return lists


def _words(value: Any) -> dict[str, str | int]:
    """Return words by their labels; a word without one is its own."""
    values = [value] if isinstance(value, (str, int)) else value
    if is_list(values):
        values = {str(word): word for word in values}
    if (
        is_object(values)
        and 0 < len(values) <= MAX_WORDS
        and all(type(word) in (str, int) for word in values.values())
    ):
        return values
    raise ValueError(
        f"must be 1 to {MAX_WORDS} words or token ids, in a list or, by their labels, an object"
    )


TokenIds = Annotated[
    Any,
    BeforeValidator(_token_ids),
    WithJsonSchema({"anyOf": [TOKEN_IDS, many(TOKEN_IDS)]}),
]
Words = Annotated[
    Any,
    BeforeValidator(_words),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "items": _WORD, "minItems": 1, "maxItems": MAX_WORDS},
                {"type": "object", "additionalProperties": _WORD, "minProperties": 1},
            ]
        }
    ),
]


class MlmRequest(PoolingFields):
    """Texts with masks, and the wanted facts about each mask."""

    texts: Texts = Field(None, description="A text or several, with the model's mask token.")
    token_ids: TokenIds = Field(
        None, description="Texts as token ids, special ones included, in place of texts."
    )
    return_top_k: StrictInt = Field(
        5,
        ge=0,
        le=MAX_TOP_K,
        description="How many of the likeliest tokens to report per mask.",
    )
    return_logits: StrictBool = Field(
        False, description="Report logits of the targets or label words, else of the vocabulary."
    )
    targets: Words | None = Field(
        None, description="Report only these tokens, with probabilities in the whole vocabulary."
    )
    label_words: Words | None = Field(
        None, description="Compare these tokens alone: their scores add up to 1."
    )
    pseudo_log_likelihood: StrictBool = Field(
        False, description="Score whole texts instead: each token by the others."
    )
    request_ids: list[StrictStr] | None = Field(
        None, description="A name for each text, repeated with its result."
    )

    def check(self) -> None:
        """Refuse fields that do not go together.

        Raises:
            InvalidRequestError: some of them do not; it names a field.
        """
        if (self.texts is None) == (self.token_ids is None):
            raise InvalidRequestError("Give either texts or token_ids, not both.", param="texts")
        if self.targets is not None and self.label_words is not None:
            raise InvalidRequestError("Give targets or label_words, not both.", param="targets")
        if self.request_ids is not None and len(self.request_ids) != len(self.sources):
            raise InvalidRequestError(
                "request_ids must have one id for each text.", param="request_ids"
            )
        if self.pseudo_log_likelihood and (self.words is not None or self.return_logits):
            raise InvalidRequestError(
                "pseudo_log_likelihood cannot be combined with targets, label_words or "
                "return_logits.",
                param="pseudo_log_likelihood",
            )

    @property
    def words(self) -> dict[str, str | int] | None:
        """Return the targets or the label words."""
        return self.label_words if self.targets is None else self.targets

    @property
    def sources(self) -> list[str] | list[list[int]]:
        """Return the texts, or their ids."""
        return self.token_ids if self.texts is None else self.texts

    @property
    def source_reading(self) -> Reading:
        """Return how ``sources`` are read."""
        return self.reading("token_ids" if self.texts is None else "texts")
