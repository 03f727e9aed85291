"""From the body of a route to a request to a net."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_parallm.api.nets.bodies import ACT, PREDICT
from mlx_parallm.api.nets.checks import (
    Rows,
    checked_actions,
    checked_inputs,
    checked_mask,
    checked_starts,
    checked_states,
)
from mlx_parallm.api.nets.schema import SEED_BITS, ActRequest, NetFields, PredictRequest
from mlx_parallm.api.nets.tensors import MARK
from mlx_parallm.nets.model import NetModel
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_mapping
from mlx_parallm.types.nets import (
    STATES,
    ActParams,
    ActResult,
    NetRequest,
    NetSignature,
    SequenceUse,
)

# RESULTS: what ``return`` names, by the policy's results; states are no such result.
RESULTS: Mapping[str, ActResult] = {
    "values": ActResult.VALUES,
    "log_probs": ActResult.LOG_PROBS,
    "entropy": ActResult.ENTROPY,
    "dist": ActResult.DIST,
}
# DEFAULTS: what is returned without ``return``, if there is any.
DEFAULTS = ("values", "log_probs", STATES)


def predict_request(
    body: PredictRequest, model: NetModel, *, request_id: str, owner: str
) -> NetRequest:
    """Return the request of a body of ``POST /v1/predict``.

    Args:
        body: the fields.
        model: the net.
        request_id: unique among those in flight.
        owner: the client, whose sequences no other sees.

    Raises:
        InvalidRequestError: a field does not suit the net.
    """
    outputs = [spec.name for spec in model.signature.outputs]
    for name in body.outputs or ():
        if name not in outputs:
            raise InvalidRequestError(
                f"outputs has {name[:100]!r}; the net returns {', '.join(outputs)}.",
                param="outputs",
            )
    rows = checked_inputs(model.signature, body.inputs, PREDICT.inputs, max_rows=model.max_rows)
    return _request(body, model, rows, request_id=request_id, owner=owner)


def act_request(body: ActRequest, model: NetModel, *, request_id: str, owner: str) -> NetRequest:
    """Return the request of a body of ``POST /v1/rl/act``; see ``predict_request``."""
    signature, policy = model.signature, model.signature.policy
    if policy is None:
        raise InvalidRequestError(
            f"{model.names[0]} is no policy; use /v1/predict.",
            param="model",
            code="unsupported_model",
        )
    check_returns(body.returns or (), signature)
    observations = _by_name(body.observations, signature)
    rows = checked_inputs(signature, observations, ACT.inputs, max_rows=model.max_rows)
    act = ActParams(
        is_deterministic=body.deterministic,
        seed=random.getrandbits(SEED_BITS) if body.seed is None else body.seed,
        action_mask=checked_mask(signature, policy, body.action_mask, rows, "action_mask"),
        actions=checked_actions(signature, policy, body.actions, rows, "actions"),
    )
    return _request(body, model, rows, act, request_id=request_id, owner=owner)


def _by_name(observations: Any, signature: NetSignature) -> Mapping[str, Any]:
    """Return the observations by the inputs' names."""
    if is_mapping(observations) and MARK not in observations:
        return observations
    if len(signature.inputs) != 1:
        names = ", ".join(spec.name for spec in signature.inputs)
        raise InvalidRequestError(
            f"observations must be an object with {names}.", param="observations"
        )
    return {signature.inputs[0].name: observations}


def check_returns(names: Sequence[str], signature: NetSignature) -> None:
    """Raise InvalidRequestError if a policy does not have what ``return`` names."""
    assert signature.policy is not None, "a policy"
    for name in names:
        has = (
            bool(signature.states)
            if name == STATES
            else (RESULTS[name] in signature.policy.results)
        )
        if not has:
            raise InvalidRequestError(
                f"return has {name}, which this {signature.policy.distribution} policy lacks.",
                param="return",
            )


def _request(
    body: NetFields,
    model: NetModel,
    rows: Rows,
    act: ActParams | None = None,
    *,
    request_id: str,
    owner: str,
) -> NetRequest:
    sequence = sequence_use(body, model.signature, owner)
    return NetRequest(
        request_id=request_id,
        model=model.names[0],
        inputs=rows.arrays,
        num_rows=rows.num_rows,
        states=checked_states(model.signature, body.hidden_states, rows, STATES),
        sequence=sequence,
        episode_start=checked_starts(body.episode_start, rows, "episode_start"),
        act=act,
    )


def sequence_use(body: NetFields, signature: NetSignature, owner: str) -> SequenceUse | None:
    """Return the state that a body wants kept; None if it names no sequence.

    Raises:
        InvalidRequestError: a field of sequences lacks the id, the body brings a state too, or the
            net has none.
    """
    if body.sequence_id is None:
        for name in ("sequence_start", "sequence_end"):
            if getattr(body, name):
                raise InvalidRequestError(f"{name} needs a sequence_id.", param=name)
        return None
    if body.hidden_states is not None:
        raise InvalidRequestError(
            "Give either sequence_id or hidden_states, not both.", param="sequence_id"
        )
    if not signature.states:
        raise InvalidRequestError(
            "sequence_id is of no use: this net has no state to be kept.", param="sequence_id"
        )
    return SequenceUse(
        owner=owner,
        sequence_id=body.sequence_id,
        is_start=body.sequence_start,
        is_end=body.sequence_end,
    )
