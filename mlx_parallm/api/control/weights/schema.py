"""Bodies and answers of the routes that replace a model's own weights."""

from __future__ import annotations

from typing import Literal

from pydantic import AliasChoices, BaseModel, Field, StrictBool, StrictStr

from mlx_parallm.api.control.adapters.schema import FolderPath, Name
from mlx_parallm.api.control.tensors import UploadTimings
from mlx_parallm.api.http.forms import OpenForm

# Fields of SGLang and vLLM that change nothing here.
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
    """What an update says besides its tensors; or all of it, where it names a folder."""

    weight_dir: FolderPath | None = Field(
        None, description="A folder with a whole checkpoint, in place of tensors."
    )
    model: Name | None = Field(None, description="The model; the first by default.")
    version: Name | None = Field(
        None,
        validation_alias=AliasChoices("version", "weight_version"),
        description="Label of the tokens they make; by default it counts on.",
    )
    expected_version: Name | None = Field(
        None, description="The version that is replaced; 412 if another is there."
    )


class UpdatedWeights(BaseModel):
    """New weights serve."""

    status: str = Field("ok", description="Always ok.")
    message: str = Field(description="What was done.")
    weight_version: str = Field(description="Label of the tokens that are made now.")
    timings: UploadTimings | None = Field(None, description="How long an upload took.")


class UpdateFromDisk(WeightsForm):
    """SGLang's body of ``/update_weights_from_disk``."""

    model_path: FolderPath = Field(description="A folder with a whole checkpoint.")
    load_format: Literal["auto", "safetensors"] = Field(
        "auto", description="Files are safetensors in any case."
    )
    abort_all_requests: StrictBool = Field(False, description="End what runs before.")
    weight_version: Name | None = Field(None, description="Label of the tokens they make.")
    flush_cache: StrictBool = Field(
        True, description="Without effect: what other weights computed is never found."
    )


class TensorFields(WeightsForm):
    """SGLang's body of ``/update_weights_from_tensor``, but for the tensors."""

    load_format: Literal["safetensors"] = Field(
        description="Each entry is a safetensors file in base64; nothing is unpickled."
    )
    abort_all_requests: StrictBool = Field(False, description="End what runs before.")
    weight_version: Name | None = Field(None, description="Label of the tokens they make.")
    flush_cache: StrictBool = Field(True, description="Without effect.")


class FinishUpdate(WeightsForm):
    """vLLM's body of ``/finish_weight_update``."""

    weight_version: Name | None = Field(None, description="What the weights are called now.")


class NewVersion(WeightsForm):
    """vLLM's and SGLang's body of ``/update_weight_version``."""

    new_version: Name = Field(description="What the weights are called now.")
    abort_all_requests: StrictBool = Field(False, description="End what runs before.")


class NewVersionAnswer(BaseModel):
    """The weights are called something else."""

    success: bool = Field(True, description="Always true.")
    message: str = Field(description="What was done.")
    new_version: str = Field(description="The label.")


class WeightInfo(BaseModel):
    """The version of a model's weights, and those of its adapters."""

    weight_version: str = Field(description="Label of the tokens that the model makes.")
    adapters: dict[str, str] = Field(description="The same of each adapter, by name.")


class CheckWeights(WeightsForm):
    """vLLM's body of ``/weight_checker`` and SGLang's of ``/weights_checker``."""

    action: Literal["checksum", "snapshot", "compare", "reset", "reset_tensors"] = Field(
        "checksum", description="What to do; a reset is not served."
    )
    baseline: dict[str, StrictStr] | None = Field(
        None, description="Checksums to compare with; the latest snapshot's by default."
    )


class CheckedWeights(BaseModel):
    """Checksums, or how they compare."""

    success: bool = Field(True, description="Always true; a difference is told by match.")
    message: str = Field(description="What was found.")
    checksums: dict[str, str] | None = Field(None, description="SHA-256 by tensor.")
    match: bool | None = Field(None, description="Whether all are as they were.")
    mismatches: list[str] | None = Field(None, description="Tensors that are not.")


class SleepAnswer(BaseModel):
    """The server sleeps."""

    status: str = Field("sleeping", description="Always sleeping.")
    level: int = Field(description="What was given back: nothing, KV, or KV and weights.")
    mode: str = Field(description="What became of requests.")


class WakeAnswer(BaseModel):
    """What is there again."""

    status: str = Field(description="awake, or sleeping while something is still put away.")
    tags: list[str] = Field(description="What is still put away.")


class IsSleeping(BaseModel):
    """Whether memory is given back."""

    is_sleeping: bool = Field(description="Until it is woken up.")


class MemoryTags(OpenForm):
    """SGLang's body of releasing and resuming memory."""

    without_effect = frozenset({"rid"})

    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = Field(
        None, description="What to give back or to have again; both by default."
    )
