"""Bodies of the routes of text-embeddings-inference (TEI)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    StrictBool,
    StrictStr,
    WithJsonSchema,
)

from mlx_parallm.api.http.forms import Ids, ListsOfIds, NullIsAbsent, OpenForm
from mlx_parallm.api.pooling.inputs.encode import Reading
from mlx_parallm.api.pooling.inputs.schema import MAX_INPUTS, Dimensions, Inputs, PromptName, many
from mlx_parallm.types.json_values import is_list

Sequences = tuple[list[tuple[str, ...]], bool]
_PAIR = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2}


def _sequences(value: Any) -> Sequences:
    """Return every text or pair of texts, and True if they came as a batch."""
    if isinstance(value, str):
        value = [value]
    if _is_sequence(value):
        return [tuple(value)], False
    if is_list(value) and 0 < len(value) <= MAX_INPUTS and all(map(_is_sequence, value)):
        return [tuple(each) for each in value], True
    raise ValueError(
        "must be a text, a pair of texts, or a list of lists of one or two texts; "
        f"at most {MAX_INPUTS}, none empty"
    )


def _is_sequence(value: Any) -> bool:
    """True if a value is a list of one text or two."""
    return (
        is_list(value)
        and len(value) in (1, 2)
        and all(isinstance(text, str) and text for text in value)
    )


def _lowered(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


class TeiFields(OpenForm):
    """Fields of all bodies; TEI itself has no ``model``."""

    model: StrictStr | None = Field(None, description="Default: the first model with this task.")
    truncate: StrictBool = Field(
        True, description="Cut inputs that are too long; false refuses them."
    )
    truncation_direction: Annotated[Literal["left", "right"], BeforeValidator(_lowered)] = Field(
        "right", description="The end at which inputs are cut."
    )

    def reading(self, param: str) -> Reading:
        """Return how the inputs of this field are read."""
        is_left = self.truncation_direction == "left"
        return Reading(truncate=-1 if self.truncate else None, from_left=is_left, param=param)


class EmbedOptions(TeiFields):
    """Options for texts that become vectors."""

    prompt_name: PromptName = None


class EmbedAllRequest(EmbedOptions):
    """Texts for vectors of tokens, or for sparse vectors."""

    inputs: Inputs = Field(description="A text or several, or the token ids of one or of several.")


class EmbedRequest(EmbedAllRequest):
    """Texts whose vectors are wanted."""

    normalize: StrictBool = Field(True, description="Divide vectors by their lengths.")
    dimensions: Dimensions = None


class PredictRequest(TeiFields):
    """Texts or pairs of texts whose labels are wanted."""

    inputs: Annotated[
        Sequences,
        BeforeValidator(_sequences),
        WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, _PAIR, many(_PAIR)]}),
    ] = Field(description="A text, a pair of texts, or a batch: a list of lists of one or two.")
    raw_scores: StrictBool = Field(False, description="Logits in place of probabilities.")


class SimilarityInputs(NullIsAbsent):
    """A sentence, and texts to compare with it."""

    source_sentence: StrictStr = Field(
        min_length=1, description="Compared with each of the others."
    )
    sentences: list[Annotated[StrictStr, Field(min_length=1)]] = Field(
        min_length=1, max_length=MAX_INPUTS - 1, description="Compared with it."
    )


class SimilarityRequest(OpenForm):
    """Hugging Face's body of the task sentence-similarity."""

    model: StrictStr | None = Field(None, description="Default: the first model with this task.")
    inputs: SimilarityInputs = Field(description="The texts.")
    parameters: EmbedOptions | None = Field(None, description="How they are read.")


class DecodeRequest(OpenForm):
    """Token ids to be turned into texts."""

    model: StrictStr | None = Field(None, description="The first pooling model by default.")
    ids: Ids | ListsOfIds = Field(
        min_length=1, max_length=65_536, description="Of one text or of several."
    )
    skip_special_tokens: StrictBool = Field(True, description="Leave special tokens out.")
