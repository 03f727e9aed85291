"""Types of fields that bodies of training sessions share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, StrictStr

from mlx_parallm.api.http.forms import NullIsAbsent

MAX_NAME_CHARS = 256
Name = Annotated[StrictStr, Field(min_length=1, max_length=MAX_NAME_CHARS)]
#: ``MAX_NUMBER``: beyond it a product of two settings may be infinite in float32.
MAX_NUMBER = 1e15
Finite = Annotated[float, Field(allow_inf_nan=False, le=MAX_NUMBER)]
Beta = Annotated[float, Field(allow_inf_nan=False, ge=0, lt=1)]
Loss = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=-MAX_NUMBER, le=MAX_NUMBER)]


class Strict(NullIsAbsent):
    """A body of which every field must be known: a typing error must not train something else."""

    model_config = ConfigDict(extra="forbid")


def kind_of(value: Any) -> str:
    """Return which of a string and a list a value is to be, so that problems are those of one."""
    return "<name>" if isinstance(value, str) else "<list>"


def container_of(value: Any) -> str:
    """Return which of an object and a list a value is to be; see ``kind_of``."""
    return "<object>" if isinstance(value, dict) else "<list>"
