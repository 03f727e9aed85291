"""Bodies and answers of ART's routes, as openpipe-art 0.5.23 writes and reads them."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from mlx_parallm.api.control.adapters.schema import FolderPath, Name
from mlx_parallm.api.http.forms import INT64, OpenForm

#: Of openpipe-art 0.5.23, which takes no other.
PROTOCOL_VERSION = 5

Id = Annotated[StrictStr, Field(min_length=1, max_length=256)]


class ArtCapabilities(BaseModel):
    """What ART can rely on. It refuses an answer with any other field."""

    runtime: str = Field("art_vllm", description="The protocol that ART's own server speaks.")
    protocol_version: int = Field(PROTOCOL_VERSION, description="Of that protocol.")
    binary_routed_experts: bool = Field(False, description="Replay of experts is not served.")
    fast_metrics: None = Field(None, description="Not served; see /metrics.")
    inplace_lora_load: bool = Field(True, description="/v1/load_lora_adapter has load_inplace.")
    in_flight_lora_updates: bool = Field(True, description="/art/in_flight_lora_update.")
    policy_token_spans: bool = Field(True, description="Chats tell them where nvext asks.")


class InFlightUpdate(OpenForm):
    """ART's body of ``/art/in_flight_lora_update``."""

    operation_id: Id = Field(description="The same for a repetition of the same update.")
    model_name: Name = Field(description="That requests use.")
    lora_slot: Name | None = Field(None, description="The same name.")
    lora_path: FolderPath = Field(description="A folder that this server may read.")
    generation_id: Id = Field(description="What the adapter is called from the next token on.")
    expected_generation_id: Id = Field(description="What it is called now; 412 if it is not.")
    policy_version: StrictInt = Field(ge=0, lt=INT64, description="The training step it is of.")
    base_model_name: Name | None = Field(None, description="The base model; the first by default.")
    is_3d_lora_weight: StrictBool = Field(False, description="Only false is served.")


class InFlightUpdated(BaseModel):
    """A generation that serves now."""

    model_config = ConfigDict(protected_namespaces=())

    status: str = Field("updated", description="Always updated.")
    model_name: str = Field(description="That requests use.")
    lora_slot: str = Field(description="The same name.")
    generation_id: str = Field(description="What the adapter is called now.")
    policy_version: int = Field(description="The training step it is of.")
    update_seq: int = Field(description="Grows with every update.")
