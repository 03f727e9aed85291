"""The texts of a body's ``inputs``, and how they are read."""

from __future__ import annotations

from typing import Any

from mlx_parallm.api.pooling.hf.schema import TaskParameters
from mlx_parallm.api.pooling.inputs.encode import Reading
from mlx_parallm.api.pooling.inputs.schema import MAX_INPUTS, as_texts
from mlx_parallm.types.errors import InvalidRequestError


def texts_of(inputs: Any) -> list[str]:
    """Return a text or several as a list.

    Raises:
        InvalidRequestError: ``inputs`` is something else.
    """
    texts = as_texts(inputs)
    if texts is None:
        raise InvalidRequestError(
            f"inputs must be a text or a list of 1 to {MAX_INPUTS} texts.", param="inputs"
        )
    return texts


def reading(parameters: TaskParameters) -> Reading:
    """Return how inputs are read."""
    return Reading(
        truncate=-1 if parameters.truncate else None,
        from_left=(parameters.truncation_direction or "").lower() == "left",
        param="inputs",
    )
