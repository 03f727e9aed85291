"""Bodies of the routes that load, replace and drop adapters."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    Field,
    StrictBool,
    StrictStr,
)

from mlx_parallm.api.control.tensors import UploadTimings
from mlx_parallm.api.http.forms import OpenForm

MAX_NAME_CHARS = 256
MAX_PATH_CHARS = 4096

Name = Annotated[StrictStr, Field(min_length=1, max_length=MAX_NAME_CHARS)]
FolderPath = Annotated[StrictStr, Field(min_length=1, max_length=MAX_PATH_CHARS)]


def _parsed(value: Any) -> Any:
    """Return an object, from its JSON where a form, a query or a header brings it."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"must be JSON: {error}") from None


class AdapterFields(OpenForm):
    """What an upload says besides its tensors, in its form, its query, its headers or its JSON."""

    name: Name = Field(description="That requests are to use as their model.")
    config: Annotated[dict[str, Any], BeforeValidator(_parsed)] = Field(
        validation_alias=AliasChoices("config", "adapter_config"),
        description="The content of adapter_config.json, as PEFT or mlx-lm writes it.",
    )
    model: Name | None = Field(None, description="The base model; the first by default.")
    version: Name | None = Field(
        None, description="Label of the tokens it makes; by default it counts on."
    )
    expected_version: Name | None = Field(
        None, description="The version that this one replaces; 412 if another is there."
    )
    pinned: bool | None = Field(None, description="Whether it keeps its slot once it has one.")


class AdapterCard(BaseModel):
    """A loaded adapter."""

    object: str = Field("adapter", description="Always adapter.")
    name: str = Field(description="That requests use as their model.")
    model: str = Field(description="The first name of its base model.")
    version: str = Field(description="Label of the tokens that it makes now.")
    digest: str = Field(description="SHA-256 of what it changes: its identity.")
    rank: int = Field(description="The largest of its modules.")
    bytes: int = Field(validation_alias="num_bytes", description="Of its tensors.")
    created: int = Field(description="Unix seconds of this version.")
    source: str | None = Field(None, description="The folder it came from; null for an upload.")
    pinned: bool = Field(
        validation_alias="is_pinned", description="Whether it keeps its slot once it has one."
    )
    resident: bool = Field(validation_alias="is_resident", description="Whether it has a slot.")
    num_running: int = Field(description="Sequences that run with it.")


class UploadedAdapter(AdapterCard):
    """An adapter that serves now."""

    timings: UploadTimings = Field(description="How long that took.")


class AdapterList(BaseModel):
    """All loaded adapters."""

    object: str = Field("list", description="Always list.")
    data: list[AdapterCard] = Field(description="By when they were first loaded.")


class DeletedAdapter(BaseModel):
    """An adapter that admits no more requests."""

    object: str = Field("adapter", description="Always adapter.")
    name: str = Field(description="Its name.")
    deleted: bool = Field(True, description="Always true.")


class LoraForm(OpenForm):
    """What bodies of vLLM and SGLang say of an adapter."""

    # Ids that the two servers have, and nothing else reads.
    without_effect = frozenset({"lora_int_id", "lora_id", "rid", "http_worker_ipc"})


class UnloadLora(LoraForm):
    """vLLM's and SGLang's body of unloading one."""

    lora_name: Name = Field(description="Its name.")


class NewLora(LoraForm):
    """What both ways to load an adapter say of it."""

    lora_name: Name = Field(description="That requests are to use as their model.")
    base_model_name: Name | None = Field(None, description="The base model; the first by default.")
    pinned: StrictBool | None = Field(None, description="Whether it keeps its slot.")
    version: Name | None = Field(None, description="Label of the tokens it makes.")
    expected_version: Name | None = Field(None, description="The version that this one replaces.")


class LoadLora(NewLora):
    """vLLM's and SGLang's body of loading an adapter from a folder."""

    lora_path: FolderPath = Field(description="A folder that this server may read.")
    load_inplace: StrictBool = Field(False, description="Whether it may replace another.")
    is_3d_lora_weight: StrictBool = Field(False, description="Only false is served.")
    flush_cache: StrictBool = Field(False, description="Whether to forget what was cached.")


class LoraTensors(NewLora):
    """SGLang's body of ``/load_lora_adapter_from_tensors``, but for the tensors."""

    config_dict: dict[str, Any] = Field(description="The content of adapter_config.json.")
    load_format: Literal["safetensors"] = Field(
        description="Each entry is a safetensors file in base64; nothing is unpickled."
    )


class LoraAnswer(BaseModel):
    """SGLang's answer."""

    success: bool = Field(True, description="Always true; errors have another status.")
    error_message: str = Field("", description="Always empty.")
    loaded_adapters: dict[str, str] = Field(
        description="Folder, or name where there is none, by name."
    )
