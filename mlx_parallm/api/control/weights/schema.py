"""Bodies and answers of the routes that replace adapters and a model's own weights."""

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

from mlx_parallm.api.control.weights.tensors import UploadTimings
from mlx_parallm.api.http.forms import OpenForm

MAX_NAME_CHARS = 256
MAX_PATH_CHARS = 4096

Name = Annotated[StrictStr, Field(min_length=1, max_length=MAX_NAME_CHARS)]
FolderPath = Annotated[StrictStr, Field(min_length=1, max_length=MAX_PATH_CHARS)]
# WITHOUT_EFFECT: fields of SGLang and vLLM that change nothing here.
WITHOUT_EFFECT = frozenset(
    [
        "allow_quant_error",
        "is_async",
        "is_checkpoint_format",
        "keep_pause",
        "manifest",
        "recapture_cuda_graph",
        "rid",
        "selector",
        "skip_tensor_list",
        "token_step",
        "torch_empty_cache",
    ]
)


def _parsed(value: Any) -> Any:
    """Return an object, parsed if it came as text in a form, a query or a header."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"must be JSON: {error}") from None


class AdapterFields(OpenForm):
    """The fields of an upload beside its tensors, in a form, a query, headers or JSON."""

    name: Name = Field(description="The name that requests use as their model.")
    config: Annotated[dict[str, Any], BeforeValidator(_parsed)] = Field(
        validation_alias=AliasChoices("config", "adapter_config"),
        description="The content of adapter_config.json, as PEFT or mlx-lm writes it.",
    )
    model: Name | None = Field(
        None, description="The base model; by default the first that takes adapters."
    )
    version: Name | None = Field(
        None, description="Label of its tokens; by default the next number."
    )
    expected_version: Name | None = Field(
        None, description="The version to replace; 412 if another is loaded."
    )
    pinned: bool | None = Field(None, description="True keeps it in its slot.")


class AdapterCard(BaseModel):
    """A loaded adapter."""

    object: str = Field(default="adapter", description="Always adapter.")
    name: str = Field(description="The name that requests use as their model.")
    model: str = Field(description="The first name of its base model.")
    version: str = Field(description="Label of its tokens now.")
    digest: str = Field(description="SHA-256 of its content.")
    rank: int = Field(description="The largest rank of its modules.")
    bytes: int = Field(validation_alias="num_bytes", description="Size of its tensors.")
    created: int = Field(description="Unix time of this version.")
    source: str | None = Field(default=None, description="Its folder; null for an upload.")
    pinned: bool = Field(validation_alias="is_pinned", description="True keeps it in its slot.")
    resident: bool = Field(validation_alias="is_resident", description="True if it has a slot.")
    num_running: int = Field(description="Sequences running with it.")


class UploadedAdapter(AdapterCard):
    """An adapter that was just loaded."""

    timings: UploadTimings = Field(description="How long that took.")


class AdapterList(BaseModel):
    """All loaded adapters."""

    object: str = Field(default="list", description="Always list.")
    data: list[AdapterCard] = Field(description="In the order of loading.")


class DeletedAdapter(BaseModel):
    """An adapter that was unloaded."""

    object: str = Field(default="adapter", description="Always adapter.")
    name: str = Field(description="Its name.")
    deleted: bool = Field(default=True, description="Always true.")


class LoraForm(OpenForm):
    """A body of vLLM or SGLang about an adapter."""

    # These ids are internal to the two servers.
    without_effect = frozenset({"lora_int_id", "lora_id", "rid", "http_worker_ipc"})


class UnloadLora(LoraForm):
    """vLLM's and SGLang's body for unloading an adapter."""

    lora_name: Name = Field(description="Its name.")


class NewLora(LoraForm):
    """The fields of both ways to load an adapter."""

    lora_name: Name = Field(description="The name that requests use as their model.")
    base_model_name: Name | None = Field(
        None, description="The base model; by default the first that takes adapters."
    )
    pinned: StrictBool | None = Field(None, description="True keeps it in its slot.")
    version: Name | None = Field(None, description="Label of its tokens.")
    expected_version: Name | None = Field(None, description="The version to replace.")


class LoadLora(NewLora):
    """vLLM's and SGLang's body for loading an adapter from a folder."""

    lora_path: FolderPath = Field(description="A folder that this server may read.")
    load_inplace: StrictBool = Field(False, description="True may replace a loaded adapter.")
    is_3d_lora_weight: StrictBool = Field(False, description="Only false is served.")
    flush_cache: StrictBool = Field(False, description="True also empties the prefix cache.")


class LoraTensors(NewLora):
    """SGLang's body of ``/load_lora_adapter_from_tensors`` without the tensors."""

    config_dict: dict[str, Any] = Field(description="The content of adapter_config.json.")
    load_format: Literal["safetensors"] = Field(
        description="Each entry is a safetensors file in base64; nothing is unpickled."
    )


class LoraAnswer(BaseModel):
    """SGLang's answer."""

    success: bool = Field(default=True, description="Always true; errors have another status.")
    error_message: str = Field(default="", description="Always empty.")
    loaded_adapters: dict[str, str] = Field(
        description="The folder of each adapter by name; for an upload, its name."
    )


class WeightsForm(OpenForm):
    """A body of vLLM or SGLang, some of whose fields change nothing here."""

    without_effect = WITHOUT_EFFECT


class UpdateFields(WeightsForm):
    """The fields of an update beside its tensors; or all of it, if it names a folder."""

    weight_dir: FolderPath | None = Field(
        None, description="A folder with a whole checkpoint, in place of tensors."
    )
    model: Name | None = Field(None, description="The model; the first by default.")
    version: Name | None = Field(
        None,
        validation_alias=AliasChoices("version", "weight_version"),
        description="Label of their tokens; by default the next number.",
    )
    expected_version: Name | None = Field(
        None, description="The version to replace; 412 if another is loaded."
    )


class UpdatedWeights(BaseModel):
    """New weights are in use."""

    status: str = Field(default="ok", description="Always ok.")
    message: str = Field(description="What was done.")
    weight_version: str = Field(description="Label of the tokens from now on.")
    timings: UploadTimings | None = Field(default=None, description="How long an upload took.")


class UpdateFromDisk(WeightsForm):
    """SGLang's body of ``/update_weights_from_disk``."""

    model_path: FolderPath = Field(description="A folder with a whole checkpoint.")
    load_format: Literal["auto", "safetensors"] = Field(
        "auto", description="Files are safetensors in any case."
    )
    abort_all_requests: StrictBool = Field(False, description="Abort running requests first.")
    weight_version: Name | None = Field(None, description="Label of their tokens.")
    flush_cache: StrictBool = Field(
        True, description="Without effect: KV of other weights is never reused."
    )


class TensorFields(WeightsForm):
    """SGLang's body of ``/update_weights_from_tensor`` without the tensors."""

    load_format: Literal["safetensors"] = Field(
        description="Each entry is a safetensors file in base64; nothing is unpickled."
    )
    abort_all_requests: StrictBool = Field(False, description="Abort running requests first.")
    weight_version: Name | None = Field(None, description="Label of their tokens.")
    flush_cache: StrictBool = Field(True, description="Without effect.")


class FinishUpdate(WeightsForm):
    """vLLM's body of ``/finish_weight_update``."""

    weight_version: Name | None = Field(None, description="The new label of the weights.")


class NewVersion(WeightsForm):
    """vLLM's and SGLang's body of ``/update_weight_version``."""

    new_version: Name = Field(description="The new label of the weights.")
    abort_all_requests: StrictBool = Field(False, description="Abort running requests first.")


class NewVersionAnswer(BaseModel):
    """The weights have a new label."""

    success: bool = Field(default=True, description="Always true.")
    message: str = Field(description="What was done.")
    new_version: str = Field(description="The label.")


class WeightInfo(BaseModel):
    """The version of a model's weights, and those of its adapters."""

    weight_version: str = Field(description="Label of the model's tokens.")
    adapters: dict[str, str] = Field(description="The label of each adapter, by name.")


class CheckWeights(WeightsForm):
    """vLLM's body of ``/weight_checker`` and SGLang's of ``/weights_checker``."""

    action: Literal["checksum", "snapshot", "compare", "reset", "reset_tensors"] = Field(
        "checksum", description="What to do; a reset is not served."
    )
    model: Name | None = Field(None, description="The model; the first by default.")
    baseline: dict[str, StrictStr] | None = Field(
        None,
        description="Checksums to compare with; by default those of the model's snapshot.",
    )


class CheckedWeights(BaseModel):
    """Checksums, or how they compare with a baseline."""

    success: bool = Field(default=True, description="Always true; match reports a difference.")
    message: str = Field(description="What was found.")
    checksums: dict[str, str] | None = Field(default=None, description="SHA-256 by tensor.")
    match: bool | None = Field(default=None, description="True if no tensor changed.")
    mismatches: list[str] | None = Field(default=None, description="Tensors that changed.")
