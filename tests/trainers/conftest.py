"""The live server that ``run_all.py`` started, for trainers' clients.

These tests run in environments of their own, which hold the clients and not this package.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import requests

TIMEOUT_S = 120
#: BY_NAME: version of adapters that a request has named, and which each server finds for itself.
BY_NAME = "1"


@dataclass(frozen=True)
class LiveServer:
    """The server's address, and the folders that it may read.

    Attributes:
        url: without ``/v1``.
        model: its first name.
        folder: the embedded model in the form that transformers reads.
        adapters: the folder below which it loads adapters by path or name.
        peers: addresses of servers that change together with it.
        num_ranks: the processes that compute its models together.
    """

    url: str
    model: str
    folder: Path
    adapters: Path
    peers: tuple[str, ...] = ()
    num_ranks: int = int(os.environ.get("MLX_PARALLM_TEST_RANKS", "1"))

    def changes(self, url: str) -> object:
        """Return the version, the adapters and the pause of a server of a fleet."""
        get = partial(requests.get, timeout=TIMEOUT_S)
        cards = get(f"{url}/v1/adapters").json()["data"]
        adapters = {
            card["name"]: (card["version"], card["digest"])
            for card in cards
            if card["version"] != BY_NAME
        }
        label = get(f"{url}/weight_info").json()["weight_version"]
        return label, adapters, get(f"{url}/is_paused").json()

    def get(self, path: str, **more: object) -> requests.Response:
        """Send a GET request; return any answer."""
        return requests.get(self.url + path, timeout=TIMEOUT_S, **more)

    def post(self, path: str, body: object = None, **more: object) -> requests.Response:
        """Send a JSON body; return any answer."""
        return requests.post(self.url + path, json=body, timeout=TIMEOUT_S, **more)

    def ok(self, path: str, body: object = None, **more: object) -> requests.Response:
        """Send a JSON body; fail with the answer's text unless it is 200."""
        answer = self.post(path, body, **more)
        assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}"
        return answer


@pytest.fixture(scope="session")
def server() -> LiveServer:
    """Return the server that the environment names."""
    variables = {
        name: os.environ[f"TRAINERS_{name.upper()}"]
        for name in ("url", "model", "folder", "adapters")
    }
    folder, adapters = Path(variables["folder"]), Path(variables["adapters"])
    peers = os.environ.get("TRAINERS_PEERS", "").split()
    return LiveServer(variables["url"], variables["model"], folder, adapters, tuple(peers))


@pytest.fixture(autouse=True)
def _no_adapters_left(server: LiveServer) -> object:
    """Unload all adapters and resume the server after every test; its peers are as it is."""
    yield
    for peer in server.peers:
        assert server.changes(peer) == server.changes(server.url)
    for card in server.get("/v1/models").json()["data"]:
        if card.get("parent"):
            server.post("/v1/unload_lora_adapter", {"lora_name": card["id"]})
    server.post("/resume")
