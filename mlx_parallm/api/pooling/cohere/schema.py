"""The body of Cohere's ``POST /v2/embed`` (https://docs.cohere.com/reference/embed)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, StrictInt, StrictStr

from mlx_parallm.api.http.forms import OpenForm
from mlx_parallm.api.http.keep_alive import KeepAliveFields
from mlx_parallm.api.pooling.inputs.encode import Reading
from mlx_parallm.api.pooling.inputs.schema import MAX_INPUTS, Dimensions
from mlx_parallm.api.turns.fields import BodyValue
from mlx_parallm.types.errors import InvalidRequestError

#: ``Embedding``: a type of numbers that vectors are answered in.
Embedding = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
#: ``FIELDS``: the body's names of fields in messages of refusals.
FIELDS = {"dimensions": "output_dimension"}


class EmbedRequest(KeepAliveFields, OpenForm):
    """Texts, or inputs of several parts."""

    model: StrictStr | None = Field(None, description="Default: the first model of vectors.")
    texts: list[StrictStr] | None = Field(
        None, min_length=1, max_length=MAX_INPUTS, description="The texts."
    )
    inputs: list[dict[str, Any]] | None = Field(
        None,
        min_length=1,
        max_length=MAX_INPUTS,
        description='In place of texts: {"content": [{"type": "text", "text": …}]}.',
    )
    images: list[StrictStr] | None = Field(
        None, description="Refused: no model of vectors here reads images."
    )
    input_type: StrictStr | None = Field(
        None,
        description="search_query, search_document, classification or clustering: the model's "
        "prompt for that use precedes the texts.",
    )
    embedding_types: list[Embedding] = Field(
        default_factory=lambda: list[Embedding](["float"]),
        min_length=1,
        description="Types of numbers: float; int8 and uint8, scaled by each vector's largest "
        "number; binary and ubinary, eight signs a byte; base64 of float32.",
    )
    output_dimension: Dimensions = None
    max_tokens: StrictInt | None = Field(
        None, ge=1, description="Most tokens of an input; default: the model's limit."
    )
    truncate: Literal["NONE", "START", "END"] = Field(
        "END", description="The end at which longer inputs are cut; NONE refuses them."
    )
    priority: StrictInt | None = Field(None, description="Ignored.")

    def sources(self) -> tuple[Sequence[str], str]:
        """Return the texts, and the field that they came from.

        Raises:
            InvalidRequestError: the body has not exactly one kind of input, or has images.
        """
        names = ("texts", "inputs", "images")
        present = [name for name in names if getattr(self, name) is not None]
        if len(present) != 1:
            raise InvalidRequestError("Give exactly one of texts, inputs and images.")
        if self.texts is not None:
            return self.texts, "texts"
        if self.inputs is not None:
            parts = BodyValue(self.inputs, "inputs").entries()
            return [_text_of(each["content"]) for each in parts], "inputs"
        raise _no_images("images")

    def reading(self, param: str, longest: int) -> Reading:
        """Return how the inputs of this field are read by a model that reads so many tokens."""
        if self.truncate == "NONE":
            return Reading(param=param)
        most = -1 if self.max_tokens is None else min(self.max_tokens, longest)
        return Reading(truncate=most, from_left=self.truncate == "START", param=param)


def _text_of(content: BodyValue) -> str:
    """Return the texts of an input's parts, a line each."""
    texts: list[str] = []
    for part in content.entries():
        if part.type == "image_url":
            raise _no_images(part.where)
        if part.type != "text":
            raise part["type"].refusal('must be "text"')
        texts.append(part["text"].filled_text())
    return "\n".join(texts)


def _no_images(where: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{where}: no model of vectors here reads images.",
        param=where,
        code="unsupported_parameter",
    )
