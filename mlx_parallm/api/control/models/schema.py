"""Bodies of the routes that list, load and unload models."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    AliasChoices,
    BeforeValidator,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
)

from mlx_parallm.api.control.adapters.schema import FolderPath, Name
from mlx_parallm.api.http.forms import OpenForm
from mlx_parallm.config import ModelTask

MAX_NAMES = 16


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


class LoadModel(OpenForm):
    """An encoder to load, or a served one to bring into memory."""

    model: FolderPath = Field(
        validation_alias=AliasChoices("model", "model_path"),
        description="A folder or a hub id that this server may load, or a name that is served.",
    )
    name: Annotated[list[Name], BeforeValidator(_listed), Field(max_length=MAX_NAMES)] = Field(
        default_factory=list,
        validation_alias=AliasChoices("name", "served_model_name"),
        description="A name for requests, or several; by default the folder or id.",
    )
    task: Literal["auto"] | ModelTask = Field(
        "auto", description="Its task; by default what its files say."
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] | None = Field(
        None, description="Its dtype; the server's --dtype by default."
    )
    revision: StrictStr | None = Field(None, description="Branch, tag or commit on the hub.")
    max_model_len: StrictInt | None = Field(
        None, ge=1, description="Longest input in tokens; the model's own by default."
    )
    pin: StrictBool = Field(False, description="True keeps it in memory until it is unloaded.")


class UnloadModel(OpenForm):
    """An encoder to unload."""

    model: Name = Field(
        validation_alias=AliasChoices("model", "instance_id"), description="One of its names."
    )
