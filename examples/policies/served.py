"""A policy that a server has, over HTTP."""

from __future__ import annotations

import base64
from typing import Any

import httpx2
import numpy as np

from examples.policies.rollouts import Acts, Arrays
from mlx_parallm.client.tensors import encode_safetensors

TIMEOUT_S = 60.0


class RefusedError(RuntimeError):
    """The server answered with an error."""


class ServedPolicy:
    """Acts by ``POST /v1/rl/act``. Implements ``ActingPolicy``.

    Arrays travel as json-numpy's objects, which cost less than lists of numbers.
    """

    def __init__(self, url: str, model: str, api_key: str | None = None) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx2.Client(base_url=url, headers=headers, timeout=TIMEOUT_S)
        self._model = model
        self._version: str | None = None

    def act(
        self,
        observations: np.ndarray,
        states: Arrays,
        starts: np.ndarray,
        *,
        seed: int | None = None,
    ) -> Acts:
        """See ``ActingPolicy``."""
        body: dict[str, Any] = {
            "model": self._model,
            "observations": packed(observations),
            "deterministic": seed is None,
        }
        if seed is not None:
            body["seed"] = seed
        if states:
            body["hidden_states"] = {name: packed(state) for name, state in states.items()}
            body["episode_start"] = packed(starts)
        answer = self._post("/v1/rl/act", json=body)
        after = answer.get("new_hidden_states", {})
        return Acts(
            actions=unpacked(answer["actions"]),
            log_probs=unpacked(answer["log_probs"]),
            values=unpacked(answer["value_estimates"]),
            states={name: unpacked(state) for name, state in after.items()},
            version=answer["policy_version"],
        )

    def upload(self, weights: Arrays, version: str) -> None:
        """See ``ActingPolicy``. The server refuses it if others have changed the policy since."""
        options = {"model": self._model, "version": version}
        if self._version is not None:
            options["expected_version"] = self._version
        answer = self._post(
            "/update_weights",
            params=options,
            content=encode_safetensors(weights),
            headers={"content-type": "application/octet-stream"},
        )
        self._version = answer["weight_version"]

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _post(self, path: str, **request: Any) -> Any:
        answer = self._http.post(path, **request)
        if answer.is_error:
            raise RefusedError(f"{path}: {answer.status_code} {answer.text[:500]}")
        return answer.json()


def packed(array: np.ndarray) -> dict[str, Any]:
    """Return an array as json-numpy writes it."""
    data = base64.b64encode(array.tobytes()).decode()
    return {"__numpy__": data, "dtype": array.dtype.str, "shape": list(array.shape)}


def unpacked(value: dict[str, Any]) -> np.ndarray:
    """Return an array that json-numpy has written."""
    data = base64.b64decode(value["__numpy__"])
    return np.frombuffer(data, value["dtype"]).reshape(value["shape"])
