"""The texts of a body's ``inputs``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_parallm.api.pooling.hf.job import Job
from mlx_parallm.api.pooling.hf.schema import TaskParameters
from mlx_parallm.api.pooling.inputs.encode import Role, single_inputs
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import EncodeInput, Task

MAX_TEXTS = 8192


def texts_of(inputs: Any) -> list[str]:
    """A text or several.

    Raises:
        InvalidRequestError: ``inputs`` is something else.
    """
    given = [inputs] if isinstance(inputs, str) else inputs
    is_list = isinstance(given, list) and 0 < len(given) <= MAX_TEXTS
    if is_list and all(isinstance(one, str) for one in given):
        return given
    raise InvalidRequestError(
        f"inputs must be a text or a list of 1 to {MAX_TEXTS} texts.", param="inputs"
    )


def cut_to(parameters: TaskParameters) -> int | None:
    """The same as ``truncate_prompt_tokens`` says it."""
    return -1 if parameters.truncate else None


def cuts_left(parameters: TaskParameters) -> bool:
    """Whether texts are cut at their beginnings."""
    return (parameters.truncation_direction or "").lower() == "left"


async def text_inputs(
    job: Job, texts: Sequence[Any], task: Task, *, prompt: str = ""
) -> tuple[EncodeInput, ...]:
    """Inputs of a text, or of its ids, each; see ``single_inputs``."""
    return await single_inputs(
        texts,
        job.model,
        task,
        truncate=cut_to(job.parameters),
        from_left=cuts_left(job.parameters),
        role=Role(prompt=prompt),
        param="inputs",
    )
