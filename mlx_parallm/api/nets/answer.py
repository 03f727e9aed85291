"""From a net's results to the fields of an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_parallm.api.nets.request import DEFAULTS
from mlx_parallm.api.nets.schema import ActRequest, NetFields, PredictRequest
from mlx_parallm.types.nets import STATES, ActResult, NetResults, NetSignature

NEW_STATES = f"new_{STATES}"
# NAMES: what results are called in answers, by what ``return`` calls them.
NAMES = {"values": "value_estimates", "log_probs": "log_probs", "entropy": "entropy"}
DIST = "dist"


def predict_fields(body: PredictRequest, name: str, results: NetResults) -> dict[str, Any]:
    """Return the fields of an answer of ``POST /v1/predict`` by a net of this name."""
    wanted = results.outputs if body.outputs is None else body.outputs
    outputs = {output: results.outputs[output] for output in wanted}
    return {"outputs": outputs} | _shared(body, name, results, has_states=True)


def act_fields(body: ActRequest, name: str, results: NetResults) -> dict[str, Any]:
    """Return the fields of an answer of ``POST /v1/rl/act`` by a policy of this name."""
    outputs = results.outputs
    wanted = DEFAULTS if body.returns is None else body.returns
    fields: dict[str, Any] = {
        ActResult.ACTIONS.value: outputs[ActResult.ACTIONS],
        ActResult.ACTIONS_FOR_ENV.value: outputs[ActResult.ACTIONS_FOR_ENV],
    }
    fields |= {own: outputs.get(each) for each, own in NAMES.items() if each in wanted}
    if DIST in wanted:
        prefix = f"{ActResult.DIST}."
        fields[DIST] = {
            key.removeprefix(prefix): array
            for key, array in outputs.items()
            if key.startswith(prefix)
        }
    return fields | _shared(body, name, results, has_states=STATES in wanted)


def _shared(body: NetFields, name: str, results: NetResults, *, has_states: bool) -> dict[str, Any]:
    is_kept = body.sequence_id is not None
    return {
        "model": name,
        "policy_version": results.version,
        NEW_STATES: dict(results.states) if results.states and has_states and not is_kept else None,
        "state_has_other_weights": results.has_other_weights if is_kept else None,
    }


def file_dtypes(signature: NetSignature) -> Mapping[str, str]:
    """Return the signature's dtypes by the names that tensors have in the file of an answer."""
    states = {f"{NEW_STATES}.{spec.name}": spec.dtype for spec in signature.states}
    return states | {spec.name: spec.dtype for spec in signature.outputs}
