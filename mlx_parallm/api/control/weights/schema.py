"""Bodies and answers of the routes that replace a model's own weights."""

from __future__ import annotations

from typing import Literal

from pydantic import AliasChoices, BaseModel, Field, StrictBool, StrictStr

from mlx_parallm.api.control.adapters.schema import FolderPath, Name
from mlx_parallm.api.control.tensors import UploadTimings
from mlx_parallm.api.http.forms import OpenForm

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
    baseline: dict[str, StrictStr] | None = Field(
        None, description="Checksums to compare with; the latest snapshot's by default."
    )


class CheckedWeights(BaseModel):
    """Checksums, or how they compare with a baseline."""

    success: bool = Field(default=True, description="Always true; a difference is told by match.")
    message: str = Field(description="What was found.")
    checksums: dict[str, str] | None = Field(default=None, description="SHA-256 by tensor.")
    match: bool | None = Field(default=None, description="True if no tensor changed.")
    mismatches: list[str] | None = Field(default=None, description="Tensors that changed.")
