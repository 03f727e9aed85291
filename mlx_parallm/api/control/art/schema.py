"""Bodies and answers of ART's routes, as openpipe-art 0.5.23 writes and reads them."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from mlx_parallm.api.control.adapters.schema import FolderPath, Name
from mlx_parallm.api.http.forms import INT64, OpenForm

#: PROTOCOL_VERSION: the version of openpipe-art 0.5.23, which accepts no other.
PROTOCOL_VERSION = 5

Id = Annotated[StrictStr, Field(min_length=1, max_length=256)]


class ArtCapabilities(BaseModel):
    """Features that ART can rely on. ART refuses an answer with any other field."""

    runtime: str = Field(default="art_vllm", description="The protocol of ART's own server.")
    protocol_version: int = Field(default=PROTOCOL_VERSION, description="Version of that protocol.")
    binary_routed_experts: bool = Field(
        default=False, description="Replaying experts is not served."
    )
    fast_metrics: None = Field(default=None, description="Not served; see /metrics.")
    inplace_lora_load: bool = Field(default=True, description="See /v1/load_lora_adapter.")
    in_flight_lora_updates: bool = Field(default=True, description="/art/in_flight_lora_update.")
    policy_token_spans: bool = Field(default=True, description="Chats report spans if nvext asks.")


class InFlightUpdate(OpenForm):
    """ART's body of ``/art/in_flight_lora_update``."""

    operation_id: Id = Field(description="Identifies the update; a repetition sends the same id.")
    model_name: Name = Field(description="The name that requests use.")
    lora_slot: Name | None = Field(None, description="The same name.")
    lora_path: FolderPath = Field(description="A folder that this server may read.")
    generation_id: Id = Field(description="The adapter's version from the next token on.")
    expected_generation_id: Id = Field(description="Its version now; 412 if it has another.")
    policy_version: StrictInt = Field(ge=0, lt=INT64, description="Its training step.")
    base_model_name: Name | None = Field(None, description="The base model; the first by default.")
    is_3d_lora_weight: StrictBool = Field(False, description="Only false is served.")


class InFlightUpdated(BaseModel):
    """The generation that is served now."""

    model_config = ConfigDict(protected_namespaces=())

    status: str = Field(default="updated", description="Always updated.")
    model_name: str = Field(description="The name that requests use.")
    lora_slot: str = Field(description="The same name.")
    generation_id: str = Field(description="The adapter's version now.")
    policy_version: int = Field(description="Its training step.")
    update_seq: int = Field(description="Grows with every update.")
