"""The bodies and answers of ``POST /v1/predict`` and ``POST /v1/rl/act``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, WithJsonSchema

from mlx_parallm.api.http.forms import OpenForm

# SEED_BITS: of a seed, and MAX_SEED: the greatest.
SEED_BITS = 32
MAX_SEED = 2**SEED_BITS - 1
# MAX_ID_CHARS: of a sequence's id.
MAX_ID_CHARS = 128
#: ``Return``: what an act may be asked for beside its actions.
Return = Literal["values", "log_probs", "entropy", "dist", "hidden_states"]

_NUMBERS: dict[str, Any] = {
    "type": "array",
    "items": {},
    "description": "Nested lists of numbers, rows first.",
}
_OBJECT: dict[str, Any] = {
    "type": "object",
    "description": "An array as json-numpy writes it: its bytes in base64, NumPy's dtype, a shape.",
    "properties": {
        "__numpy__": {"type": "string", "format": "byte"},
        "dtype": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
    },
    "required": ["__numpy__", "dtype", "shape"],
}
_TENSOR: dict[str, Any] = {"anyOf": [_NUMBERS, _OBJECT]}
_TENSORS: dict[str, Any] = {"type": "object", "additionalProperties": _TENSOR}
#: ``Tensor``: a tensor of a body or an answer.
Tensor = Annotated[Any, WithJsonSchema(_TENSOR)]
#: ``Tensors``: tensors by name.
Tensors = Annotated[dict[str, Any], WithJsonSchema(_TENSORS)]


class NetFields(OpenForm):
    """Which net is meant, and the state that it begins with."""

    model: StrictStr | None = Field(None, description="Default: the first net.")
    hidden_states: Tensors | None = Field(
        None,
        description="State of a recurrent net before the first time, as `new_hidden_states` of "
        "an answer; default: zeros.",
    )
    episode_start: Tensor | None = Field(
        None,
        description="Booleans [rows] or [rows, time]: where an episode begins, with a state of "
        "zeros.",
    )
    sequence_id: StrictStr | None = Field(
        None,
        min_length=1,
        max_length=MAX_ID_CHARS,
        description="In place of hidden_states: the server keeps the state under this id, for "
        "this client alone.",
    )
    sequence_start: StrictBool = Field(
        False, description="Begin the sequence with a state of zeros."
    )
    sequence_end: StrictBool = Field(
        False, description="Forget the sequence's state after this request."
    )


class PredictRequest(NetFields):
    """Inputs of a net."""

    inputs: Tensors = Field(description="By name, as the net's signature says.")
    outputs: list[StrictStr] | None = Field(
        None, min_length=1, description="Names of the outputs to return; default: all."
    )


class ActRequest(NetFields):
    """Observations of a policy."""

    observations: Annotated[Any, WithJsonSchema({"anyOf": [_NUMBERS, _OBJECT, _TENSORS]})] = Field(
        description="An array with a row for each environment, or arrays by input name; with "
        "time as the second dimension for several steps of a recurrent policy."
    )
    deterministic: StrictBool = Field(
        False, description="The likeliest action (a Gaussian's mean) instead of a draw."
    )
    seed: StrictInt | None = Field(
        None,
        ge=0,
        le=MAX_SEED,
        description="Of the draws; row i draws by (seed, i). Default: a new one.",
    )
    action_mask: Tensor | None = Field(
        None, description="Booleans [rows, choices]; false forbids a choice."
    )
    actions: Tensor | None = Field(
        None, description="Actions, as in an answer, to be judged instead of drawing any."
    )
    returns: list[Return] | None = Field(
        None,
        validation_alias="return",
        serialization_alias="return",
        description="What is returned beside actions; default: values, log_probs and "
        "hidden_states, if there are any.",
    )


class NetAnswer(BaseModel):
    """The fields that answers share."""

    model_config = ConfigDict(protected_namespaces=())

    model: str = Field(description="The model of the request.")
    policy_version: str = Field(description="Label of the weights that computed the answer.")
    new_hidden_states: Tensors | None = Field(
        None, description="State after the last time, by name; without sequence_id."
    )
    state_has_other_weights: bool | None = Field(
        None,
        description="With sequence_id: whether other weights than policy_version's made some of "
        "the state.",
    )


class PredictAnswer(NetAnswer):
    """The outputs of a net."""

    outputs: Tensors = Field(description="By name, as the net's signature says.")


class ActAnswer(NetAnswer):
    """Actions of a policy."""

    actions: Tensor = Field(description="Before they are clipped or scaled.")
    actions_for_env: Tensor = Field(
        description="The actions as an environment takes them: clipped, or scaled to its bounds."
    )
    log_probs: Tensor | None = Field(None, description="Log-probabilities of `actions`, [rows].")
    value_estimates: Tensor | None = Field(None, description="Values of the states, [rows].")
    entropy: Tensor | None = Field(None, description="Entropies of the distributions, [rows].")
    dist: Tensors | None = Field(None, description="Parameters of the distributions, by name.")
