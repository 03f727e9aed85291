"""ART's routes: capabilities, and adapters that are replaced in flight.

Bodies and answers are those that openpipe-art 0.5.23 writes and reads.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from mlx_parallm.api.control.art.policies import ArtPolicies, Policy
from mlx_parallm.api.control.weights.adapters import refuse_3d_weights
from mlx_parallm.api.control.weights.schema import FolderPath, Name
from mlx_parallm.api.http.declared import Access
from mlx_parallm.api.http.dependencies import EngineDep
from mlx_parallm.api.http.forms import INT64, OpenForm
from mlx_parallm.api.http.openapi import RL
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.turns.generation import named_by
from mlx_parallm.engine.control import EngineControl
from mlx_parallm.engine.policies import AdapterInfo
from mlx_parallm.types.errors import (
    InvalidRequestError,
    NotFoundError,
    VersionMismatchError,
)

#: PROTOCOL_VERSION: the version of openpipe-art 0.5.23, which accepts no other.
PROTOCOL_VERSION = 5

Id = Annotated[StrictStr, Field(min_length=1, max_length=256)]
routes = Routes(RL)


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
    base_model_name: Name | None = Field(
        None, description="The base model; by default the first that takes adapters."
    )
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


async def update_in_flight(
    body: InFlightUpdate, control: EngineControl, policies: ArtPolicies
) -> InFlightUpdated:
    """Move a slot from one generation to the next.

    ART repeats an operation whose answer was lost; it does nothing while its generation is served.
    ART's service begins with a generation that names itself as the expected one: that loads a slot.
    A slot that another route loaded has no generation yet, and accepts any expected one.

    Raises:
        VersionMismatchError: the slot has another generation than expected. ART's own server
            answers 409, but OpenAI's clients repeat such requests.
        NotFoundError: there is no such slot, or no such folder.
        InvalidRequestError: the folder has no adapter that can be served, or another operation
            has this id.
    """
    _check(body)
    request = body.model_dump()
    async with policies.lock:
        info = next((each for each in await control.look() if each.name == body.model_name), None)
        result: InFlightUpdated | None = policies.result_of(body.operation_id, request)
        if result is None or info is None or info.version != result.generation_id:
            policy = await _advance(body, control, policies, info)
            result = InFlightUpdated(model_name=body.model_name, **asdict(policy))
            policies.settle(body.operation_id, request, result)
    return result


def _check(body: InFlightUpdate) -> None:
    refuse_3d_weights(body.is_3d_lora_weight)
    if body.lora_slot not in (None, body.model_name):
        raise InvalidRequestError(
            "lora_slot must equal model_name, because an adapter has one name.", param="lora_slot"
        )


async def _advance(
    body: InFlightUpdate, control: EngineControl, policies: ArtPolicies, info: AdapterInfo | None
) -> Policy:
    slot = body.model_name
    current = None if info is None else policies.find(slot, info.version)
    begins = body.generation_id == body.expected_generation_id
    if info is None and not begins:
        raise NotFoundError(f"LoRA slot {slot!r} is not loaded.", param="lora_slot")
    if current is not None and current.generation_id != body.expected_generation_id:
        raise VersionMismatchError(
            f"LoRA slot {slot!r} is at generation {current.generation_id!r}, not at the expected "
            f"{body.expected_generation_id!r}.",
            param="expected_generation_id",
        )
    if current is not None and begins:
        return _same(body, current, info)
    policy = policies.begin(slot, body.generation_id, body.policy_version)
    try:
        await _load(body, control, info)
    except BaseException:
        policies.forget(policy)
        raise
    return policy


def _same(body: InFlightUpdate, current: Policy, info: AdapterInfo | None) -> Policy:
    """Return the current policy if a restarted trainer sends exactly its update again."""
    paths = (body.lora_path, str(Path(body.lora_path).resolve()))
    is_there = info is not None and info.source in paths
    if not is_there or body.policy_version != current.policy_version:
        raise VersionMismatchError("generation_id must advance.", param="generation_id")
    return current


async def _load(body: InFlightUpdate, control: EngineControl, info: AdapterInfo | None) -> None:
    with named_by({"name": "model_name", "expected_version": "expected_generation_id"}):
        await control.load_adapter_folder(
            body.model_name,
            body.lora_path,
            model=body.base_model_name or (None if info is None else info.model),
            version=body.generation_id,
            # Another route may load the adapter meanwhile.
            expected_version=None if info is None else info.version,
            replaces=info is not None,
        )


@routes.get("/art/capabilities")
async def art_capabilities() -> ArtCapabilities:
    """Return the features of ART's serving protocol that this server has."""
    return ArtCapabilities()


@routes.post("/art/in_flight_lora_update", access=Access.ADMIN)
async def in_flight_lora_update(
    body: InFlightUpdate, request: Request, engine: EngineDep
) -> InFlightUpdated:
    """Replace an adapter while requests generate with it; spans show which tokens it made."""
    return await update_in_flight(body, engine.control, request.app.state.policies)
