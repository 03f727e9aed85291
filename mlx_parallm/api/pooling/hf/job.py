"""The work of one task."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.api.pooling.encoded import ModelCall
from mlx_parallm.api.pooling.hf.schema import TaskParameters
from mlx_parallm.api.pooling.inputs.encode import Reading
from mlx_parallm.api.pooling.inputs.schema import MAX_INPUTS, as_texts
from mlx_parallm.types.errors import InvalidRequestError


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
