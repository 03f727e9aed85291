"""ART's update of an adapter in its slot, while requests generate with it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from mlx_parallm.api.control.adapters.request import refuse_3d_weights
from mlx_parallm.api.control.art.policies import Policies, Policy
from mlx_parallm.api.control.art.schema import InFlightUpdate, InFlightUpdated
from mlx_parallm.api.turns.generation import named_by
from mlx_parallm.engine.control import EngineControl
from mlx_parallm.engine.policies import AdapterInfo
from mlx_parallm.types.errors import (
    InvalidRequestError,
    NotFoundError,
    VersionMismatchError,
)


async def update_in_flight(
    body: InFlightUpdate, control: EngineControl, policies: Policies
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
    body: InFlightUpdate, control: EngineControl, policies: Policies, info: AdapterInfo | None
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
