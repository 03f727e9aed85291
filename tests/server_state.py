"""The state of a server that several tests share, and how it is put back.

Tests undo what they did themselves. If one fails before it has, the next ones would fail too.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import quote

import httpx2

from tests.server_process import ServerProcess

#: The lists of a server by their routes, and the field that names an entry.
LISTS = {
    "/v1/mezo/sessions": "id",
    "/v1/adapters": "name",
    "/v1/files": "id",
    "/v1/batches": "id",
    "/v1/chat/completions": "id",
    "/v1/models": "id",
}


@dataclass(frozen=True, slots=True)
class ServerState:
    """The names in each list of a server; lists that it refuses to show are missing."""

    names: Mapping[str, frozenset[str]]


def state_of(server: ServerProcess) -> ServerState:
    """Return what a server has."""
    with _admin(server) as client:
        return _read(client)


def put_back(server: ServerProcess, before: ServerState) -> None:
    """Resume a server, and remove what it did not have before.

    A server that has ended stays so. Weights are put back by the fixtures of the tests that change
    them.
    """
    if server.process.poll() is not None:
        return
    with suppress(httpx2.TransportError), _admin(server) as client:
        # Whatever waits for the device goes on first.
        client.post("/wake_up")
        client.post("/resume")
        # Sessions name adapters, and adapters are listed among the models.
        for route in LISTS:
            known = before.names.get(route)
            for name in _read(client).names.get(route, frozenset()) - (known or frozenset()):
                if known is not None:
                    _remove(client, route, name)


def _read(client: httpx2.Client) -> ServerState:
    answers = {route: client.get(route) for route in LISTS}
    return ServerState(
        {
            route: frozenset(entry[LISTS[route]] for entry in answer.json()["data"])
            for route, answer in answers.items()
            if answer.status_code == 200
        }
    )


def _remove(client: httpx2.Client, route: str, name: str) -> None:
    match route:
        case "/v1/models":
            client.post("/v1/models/unload", json={"model": name})
        case "/v1/batches":
            client.post(f"{route}/{name}/cancel")
        case _:
            client.delete(f"{route}/{quote(name, safe='')}")


def _admin(server: ServerProcess) -> httpx2.Client:
    """Return a client with the server's own key, if it has one."""
    flags = dict(zip(server.flags, server.flags[1:], strict=False))
    key = flags.get("--admin-api-key", flags.get("--api-key"))
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx2.Client(base_url=server.url, headers=headers)
