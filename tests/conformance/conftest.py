"""The live server that ``run_all.py`` started, for unmodified clients.

These tests run in environments of their own, which hold the clients and not this package.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import pytest


@dataclass(frozen=True)
class LiveServer:
    """Where it is, and what to say to it."""

    url: str
    api_key: str
    model: str

    @property
    def base_url(self) -> str:
        """For OpenAI's clients."""
        return f"{self.url}/v1"


@pytest.fixture(scope="session")
def server() -> LiveServer:
    """Return the server that the environment names."""
    variables = ("CONFORMANCE_URL", "CONFORMANCE_KEY", "CONFORMANCE_MODEL")
    return LiveServer(*(os.environ[name] for name in variables))


@pytest.fixture(scope="session")
def embedder(server: LiveServer) -> LiveServer:
    """Return the server with the name of its embedder."""
    return replace(server, model="embedder")


@pytest.fixture(scope="session")
def translator(server: LiveServer) -> LiveServer:
    """Return the server with the name of its encoder-decoder."""
    return replace(server, model="translator")


@pytest.fixture(scope="session")
def seeing(server: LiveServer) -> LiveServer:
    """Return the server with the name of its model that takes images."""
    return replace(server, model="demo:see")
