"""Updates while processes die: of an adapter, and of the model's own weights."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import httpx2
import mlx.core as mx
import numpy as np

from benchmarks.servers import SERVED_NAME
from loadtests.swap_clients import Policy
from loadtests.swap_samples import version_label
from loadtests.swap_uploads import ROUTE, good_body, query
from mlx_parallm.client.tensors import encode_safetensors
from mlx_parallm.demo_models.folders import DEMO_FOLDER

RAW = {"content-type": "application/octet-stream"}
ADAPTER, BASE = "policy", "base"
#: ``NORM``: the tensor that updates of the model replace. Versions with an odd number have that of
#: the checkpoint.
NORM = "model.norm.weight"
# PACE_S: seconds between two updates.
PACE_S = 0.15


def adapter_body(number: int) -> bytes:
    """Return the tensors of a version of the adapter."""
    return good_body(number)


def weights_body(number: int) -> bytes:
    """Return the tensor of a version of the model."""
    norm = norm_of_checkpoint()
    if number % 2 == 0:
        norm = norm * np.random.default_rng(1).uniform(0.2, 1.8, norm.shape).astype(np.float32)
    return encode_safetensors({NORM: norm})


def norm_of_checkpoint() -> np.ndarray:
    """Return the checkpoint's own tensor, float32."""
    for path in sorted(DEMO_FOLDER.glob("*.safetensors")):
        tensors = mx.load(str(path))
        assert isinstance(tensors, dict), "safetensors have names"
        if NORM in tensors:
            return np.array(tensors[NORM].astype(mx.float32))
    raise FileNotFoundError(f"{DEMO_FOLDER} has no {NORM}")


class Updates:
    """Sends one version of a policy after the other.

    Attributes:
        policy: what is updated.
        failures: answers that were no success, with what was killed meanwhile left to the reader.
    """

    def __init__(self, base_url: str, policy: Policy, body: Callable[[int], bytes]) -> None:
        self._base_url = base_url
        self._body = body
        self.policy = policy
        self.failures: list[str] = []
        self.num_broken = 0

    async def run(self, until: Callable[[], bool], draw: random.Random) -> None:
        """Update until stopped, and end with an odd version."""
        while not until():
            await self.send()
            await asyncio.sleep(PACE_S * draw.uniform(0.5, 1.5))
        while self.policy.live != self.policy.sent or self.policy.live % 2 == 0:
            await self.send()

    async def send(self) -> None:
        """Send the next version; if the connection breaks, it may serve or not."""
        number = self.policy.sent + 1
        body = await asyncio.to_thread(self._body, number)
        self.policy.sent = number
        async with httpx2.AsyncClient(base_url=self._base_url, timeout=60.0) as http:
            try:
                response = await self._post(http, number, body)
            except httpx2.TransportError:
                self.num_broken += 1
                return
        if response.status_code == 200:
            self.policy.live = number
        else:
            self.failures.append(f"{number}: {response.status_code} {response.text[:200]}")

    async def _post(self, http: httpx2.AsyncClient, number: int, body: bytes) -> httpx2.Response:
        label = version_label(number)
        if self.policy.name == ADAPTER:
            fields = query(ADAPTER, label)
            return await http.post(ROUTE, content=body, params=fields, headers=RAW)
        return await http.post(
            "/update_weights", content=body, params={"version": label}, headers=RAW
        )


def model_of(policy: Policy) -> str:
    """Return the name of a policy's model in requests."""
    return f"{SERVED_NAME}:{ADAPTER}" if policy.name == ADAPTER else SERVED_NAME
