"""Bodies of Hugging Face's task form, and the work that they ask for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr

from mlx_parallm.api.pooling.encoded import ModelCall
from mlx_parallm.api.pooling.hf.generation_schema import GenerationParameters
from mlx_parallm.api.pooling.inputs.encode import Reading
from mlx_parallm.api.pooling.inputs.schema import MAX_INPUTS, Dimensions, PromptName, as_texts
from mlx_parallm.types.errors import InvalidRequestError

MAX_TOP_K = 1000
MAX_TARGETS = 10_000


class TaskParameters(GenerationParameters):
    """Parameters of all tasks; each task reads its own."""

    generate_parameters: GenerationParameters | None = Field(
        None, description="Parameters of tasks that generate; they go before those beside it."
    )
    top_k: StrictInt | None = Field(
        None, ge=1, le=MAX_TOP_K, description="How many of the best are reported."
    )
    targets: list[StrictStr] | None = Field(
        None, min_length=1, max_length=MAX_TARGETS, description="Fill masks with these alone."
    )
    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = Field(
        None, description="From logits to scores; default: by the model's config."
    )
    aggregation_strategy: Literal["none", "simple", "first", "average", "max"] | None = Field(
        None, description="How labels of tokens become those of words and groups of words."
    )
    ignore_labels: list[StrictStr] | None = Field(
        None, max_length=MAX_TARGETS, description='Labels of tokens that are left out; ["O"].'
    )
    normalize: StrictBool | None = Field(
        None, description="Divide vectors by their lengths; by default as the model's files say."
    )
    prompt_name: PromptName = None
    dimensions: Dimensions = None
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="Numbers, or the bytes of little-endian float32 in base64."
    )
    truncate: StrictBool | Annotated[StrictInt, Field(ge=1)] | None = Field(
        None, description="Cut texts that are longer than the model takes, or than so many tokens."
    )
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = Field(
        None, description="The end of a text at which it is cut."
    )

    def reading(self, param: str) -> Reading:
        """Return how the inputs in this field of the body are read."""
        is_left = (self.truncation_direction or "").lower() == "left"
        # True is a number too.
        cut = -1 if self.truncate is True else self.truncate or None
        return Reading(truncate=cut, from_left=is_left, param=param)


class TaskRequest(TaskParameters):
    """The body of Hugging Face's InferenceClient; parameters may also stand beside ``inputs``."""

    inputs: Any = Field(description="A text, several, or what else the task takes.")
    parameters: TaskParameters | None = Field(None, description="Of the task.")
    options: dict[str, Any] = Field(default_factory=dict, description="Not read.")
    stream: StrictBool = Field(
        False, description="Answer by TGI's server-sent events; of tasks that generate."
    )

    def all_parameters(self) -> TaskParameters:
        """Return the fields of ``parameters``, those beside ``inputs``, and those within both."""
        beside = self.model_dump(include={*TaskParameters.model_fields}, exclude_unset=True)
        within = {} if self.parameters is None else self.parameters.model_dump(exclude_unset=True)
        merged = {**beside, **within}
        nested: dict[str, Any] = merged.pop("generate_parameters", {})
        return TaskParameters.model_validate({**merged, **nested})


@dataclass(frozen=True, slots=True)
class Job:
    """A task of a request.

    Attributes:
        inputs: the body's; of any type.
        parameters: the body's.
        call: a call of a model that can do the task.
        warnings: sentences about words that were read in another way; the task adds them.
    """

    inputs: Any
    parameters: TaskParameters
    call: ModelCall
    warnings: list[str] = field(default_factory=list[str])

    @property
    def reading(self) -> Reading:
        """Return how the inputs are read."""
        return self.parameters.reading("inputs")

    def texts(self, inputs: Any = None) -> list[str]:
        """Return the body's inputs, or others, as a list: a text or several.

        Raises:
            InvalidRequestError: they are something else.
        """
        texts = as_texts(self.inputs if inputs is None else inputs)
        if texts is None:
            raise InvalidRequestError(
                f"inputs must be a text or a list of 1 to {MAX_INPUTS} texts.", param="inputs"
            )
        return texts
