"""Base classes and types of request bodies. ``null`` means absent everywhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    StrictStr,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_object

INT64 = 2**63

# NEVER_DROPPED: fields that change the model's input, so that a form without them refuses them.
NEVER_DROPPED = frozenset(
    ["late_chunking", "max_tokens_per_doc", "max_tokens_per_query", "truncate_prompt_tokens"]
)


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("must be a number")  # noqa: TRY004 - pydantic wants ValueError
    return value


Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]

#: Lists report only their first wrong entry, because reporting a million of them takes seconds.
Ids = Annotated[list[StrictInt], Field(fail_fast=True)]

ListsOfIds = Annotated[list[Ids], Field(fail_fast=True)]

Strings = Annotated[list[StrictStr], Field(fail_fast=True)]

# MAX_PROMPTS: entries of a list of prompts; the queue's own limit is checked later.
MAX_PROMPTS = 65_536
# MAX_MESSAGES: messages of a conversation; checking so many takes 0.1 s.
MAX_MESSAGES = 16_384
# MAX_TOKEN_IDS: entries of a list of tokens of the vocabulary.
MAX_TOKEN_IDS = 2**18
# MAX_BIASES: tokens that have a bias of their own.
MAX_BIASES = 16_384

PromptTexts = Annotated[Strings, Field(max_length=MAX_PROMPTS)]

PromptIds = Annotated[ListsOfIds, Field(max_length=MAX_PROMPTS)]

#: Ids of the vocabulary, in any order.
VocabularyIds = Annotated[Ids, Field(max_length=MAX_TOKEN_IDS)]


#: What OpenAI keeps with an object: 16 pairs of at most 64 and 512 characters.
Metadata = Annotated[
    dict[
        Annotated[str, StringConstraints(strict=True, max_length=64)],
        Annotated[str, StringConstraints(strict=True, max_length=512)],
    ],
    Field(max_length=16),
]


def metadata_pairs(query: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return what the parameters ``metadata[key]=value`` of a query name.

    Raises:
        InvalidRequestError: they are more, or longer, than ``Metadata`` may be.
    """
    begin, end = "metadata[", "]"
    pairs = {
        name.removeprefix(begin).removesuffix(end): text
        for name, text in query
        if name.startswith(begin) and name.endswith(end)
    }
    try:
        return TypeAdapter(Metadata).validate_python(pairs)
    except ValidationError:
        raise InvalidRequestError(
            "metadata has at most 16 pairs of 64 and 512 characters.", param="metadata"
        ) from None


class NullIsAbsent(BaseModel):
    """A body in which ``null`` means absent for every field.

    ``without_effect`` names fields that are ignored without a warning: other servers have them, and
    clients send them routinely.
    """

    without_effect: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_may_not_be_dropped(cls, data: Any) -> Any:
        for name in NEVER_DROPPED & data.keys() if is_object(data) else ():
            if data[name] and name not in cls.model_fields:
                raise InvalidRequestError(
                    f"{name} is not supported here.", param=name, code="unsupported_parameter"
                )
        return data

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if is_object(data):
            return {key: value for key, value in data.items() if value is not None}
        return data


class MetadataUpdate(NullIsAbsent):
    """New metadata of an object. The field must be there, and ``null`` removes them."""

    metadata: Metadata = Field(description="In place of the metadata before; null removes them.")

    @model_validator(mode="before")
    @classmethod
    def _keep_null(cls, data: Any) -> Any:
        # Nulls are not dropped yet.
        if is_object(data) and data.get("metadata", True) is None:
            return {**data, "metadata": {}}
        return data


class OpenForm(NullIsAbsent):
    """A body that may have further fields, which ``model_extra`` holds."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())
