"""The client of nets and policies: ``/v1/predict`` and ``/v1/rl/act``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, Unpack

from mlx_parallm.client.errors import UnexpectedAnswerError
from mlx_parallm.client.tensors import decode_safetensors, encode_safetensors
from mlx_parallm.client.transport import Transport
from mlx_parallm.types.json_values import is_mapping

_FILE = "application/x-safetensors"
_TENSORS = frozenset({"episode_start", "action_mask", "actions"})
_NEW_STATES, _DIST = "new_hidden_states.", "dist."
#: ``Array``: an array of NumPy or MLX, or another object with the buffer protocol.
Array = Any
#: ``Returned``: what ``NetsClient.act`` may ask for beside actions.
Returned = Literal["values", "log_probs", "entropy", "dist", "hidden_states"]


class StateOptions(TypedDict, total=False):
    """Options that recurrent nets have; the API reference describes them.

    ``hidden_states`` takes ``new_hidden_states`` of an answer as it is.
    """

    model: str
    hidden_states: Mapping[str, Array]
    episode_start: Array
    sequence_id: str
    sequence_start: bool
    sequence_end: bool


class ActOptions(StateOptions, total=False):
    """Further options of ``NetsClient.act``; the API reference describes them."""

    deterministic: bool
    seed: int
    action_mask: Array
    actions: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The outputs of a net. ``numpy.asarray`` takes tensors without a copy.

    Attributes:
        outputs: by name.
        policy_version: label of the weights that computed them.
        new_hidden_states: the state after the last time, by name; empty if there is none, or the
            server keeps it.
        state_has_other_weights: whether other weights made some of a kept state; None without one.
    """

    outputs: Mapping[str, memoryview]
    policy_version: str
    new_hidden_states: Mapping[str, memoryview] = field(default_factory=dict[str, memoryview])
    state_has_other_weights: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """A policy's actions. ``numpy.asarray`` takes tensors without a copy.

    Attributes:
        actions: as they were drawn or judged.
        actions_for_env: clipped, or scaled to the environment's bounds.
        log_probs: of ``actions``.
        value_estimates: of the states.
        entropy: of the distributions.
        dist: parameters of the distributions, by name.
        policy_version: see ``Prediction``, as for the rest.
    """

    actions: memoryview
    actions_for_env: memoryview
    policy_version: str
    log_probs: memoryview | None = None
    value_estimates: memoryview | None = None
    entropy: memoryview | None = None
    dist: Mapping[str, memoryview] = field(default_factory=dict[str, memoryview])
    new_hidden_states: Mapping[str, memoryview] = field(default_factory=dict[str, memoryview])
    state_has_other_weights: bool | None = None


class NetsClient:
    """The nets of a server: ``RLClient.nets``. Tensors go and come as safetensors."""

    def __init__(self, transport: Transport) -> None:
        """Use the transport of a client."""
        self._transport = transport

    async def act(
        self,
        observations: Array | Mapping[str, Array],
        *,
        returns: Sequence[Returned] | None = None,
        **options: Unpack[ActOptions],
    ) -> Actions:
        """Return a policy's actions.

        Args:
            observations: an array with a row for each environment, or such arrays by input name.
            returns: what to return beside actions; default: values, log-probabilities and states,
                if there are any.
            options: further fields of ``POST /v1/rl/act``.

        Raises:
            TypeError: a tensor is no array.
        """
        fields = dict(options) | {"observations": observations, "return": returns}
        tensors, metadata = await self._ask("/v1/rl/act", fields)
        try:
            return Actions(
                **{name: each for name, each in tensors.items() if "." not in name},
                dist=_below(_DIST, tensors),
                **_state_of(tensors, metadata),
            )
        except (KeyError, TypeError) as error:
            raise _unexpected(error) from None

    async def predict(
        self,
        inputs: Mapping[str, Array],
        *,
        outputs: Sequence[str] | None = None,
        **options: Unpack[StateOptions],
    ) -> Prediction:
        """Return the outputs of a net.

        Args:
            inputs: arrays by name, as the net's signature says.
            outputs: names of the outputs to return; default: all.
            options: further fields of ``POST /v1/predict``.

        Raises:
            TypeError: a tensor is no array.
        """
        fields = dict(options) | {"inputs": inputs, "outputs": outputs}
        tensors, metadata = await self._ask("/v1/predict", fields)
        own = {name: each for name, each in tensors.items() if not name.startswith(_NEW_STATES)}
        try:
            return Prediction(outputs=own, **_state_of(tensors, metadata))
        except KeyError as error:
            raise _unexpected(error) from None

    async def _ask(
        self, path: str, fields: Mapping[str, Any]
    ) -> tuple[dict[str, memoryview], dict[str, str]]:
        """Return the tensors and the metadata of an answer to a body with these fields."""
        tensors: dict[str, Array] = {}
        metadata: dict[str, str] = {}
        for name, value in fields.items():
            if is_mapping(value):
                tensors |= {f"{name}.{key}": array for key, array in value.items()}
            elif name in _TENSORS or name == "observations":
                tensors[name] = value
            elif value is not None:
                metadata[name] = value if isinstance(value, str) else json.dumps(value)
        present = {name: array for name, array in tensors.items() if array is not None}
        content = await self._transport.content(
            "POST",
            path,
            content=encode_safetensors(present, metadata),
            headers={"content-type": _FILE, "accept": _FILE},
        )
        try:
            return decode_safetensors(content)
        except (ValueError, KeyError, TypeError) as error:
            raise _unexpected(error) from None


def _state_of(tensors: Mapping[str, memoryview], metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields that both answers have."""
    has_other = metadata.get("state_has_other_weights")
    return {
        "policy_version": metadata["policy_version"],
        "new_hidden_states": _below(_NEW_STATES, tensors),
        "state_has_other_weights": None if has_other is None else has_other == "true",
    }


def _below(prefix: str, tensors: Mapping[str, memoryview]) -> dict[str, memoryview]:
    """Return the tensors whose names have a prefix, by the rest of their names."""
    return {
        name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)
    }


def _unexpected(error: Exception) -> UnexpectedAnswerError:
    return UnexpectedAnswerError(f"The answer is no file of tensors as expected: {error}")
