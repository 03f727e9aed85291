"""The members of uvicorn that connections rely on: most are private, and may go in any version.

If a test fails after an update of uvicorn: read in its changes what became of the member, and mend
the module that uses it; then raise the bound in pyproject.toml.
"""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import httptools
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.lifespan.on import LifespanOn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from mlx_parallm.api.http import connection, handover, websocket
from mlx_parallm.cli import serve
from mlx_parallm.cli.api_servers import connections

# Where a member is used, as the name before the dot: of ``self`` in a class, or of a variable.
PROTOCOL = {
    "_unset_keepalive_if_required",
    "_unsupported_upgrade_warning",
    "app",
    "connection_lost",
    "connection_made",
    "cycle",
    "data_received",
    "flow",
    "headers",
    "loop",
    "on_body",
    "on_header",
    "on_headers_complete",
    "on_message_begin",
    "on_message_complete",
    "on_response_complete",
    "parser",
    "pause_writing",
    "pipeline",
    "resume_writing",
    "shutdown",
    "transport",
    "url",
}
CYCLE = {
    "chunked_encoding",
    "expected_content_length",
    "keep_alive",
    "more_body",
    "response_complete",
    "scope",
}
FLOW = {"drain", "pause_reading", "read_paused", "resume_reading", "write_paused"}
PARSER = {"get_http_version", "get_method", "set_dangerous_leniencies", "should_upgrade"}
SERVER = {
    "capture_signals",
    "config",
    "force_exit",
    "lifespan",
    "serve",
    "server_state",
    "should_exit",
    "shutdown",
    "startup",
}
STATE = {"connections", "default_headers", "tasks"}
LIFESPAN = {"shutdown", "state"}
MODULES = (connection, handover, websocket, connections, serve)


async def _app(_scope: Scope, _receive: Receive, _send: Send) -> None:
    await asyncio.Event().wait()


def _server() -> uvicorn.Server:
    config = uvicorn.Config(_app, ws="none")
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = LifespanOn(config)
    return server


async def _members() -> dict[str, set[str]]:
    """Return the members of uvicorn's objects, as they are while a request is read."""
    server = _server()
    protocol = HttpToolsProtocol(server.config, ServerState(), {}, asyncio.get_running_loop())
    protocol.connection_made(_Transport())
    protocol.data_received(b"POST / HTTP/1.1\r\ncontent-length: 1\r\n\r\n")
    members = {
        "protocol": set(dir(protocol)),
        "cycle": set(dir(protocol.cycle)),
        "flow": set(dir(protocol.flow)),
        "parser": set(dir(httptools.HttpRequestParser(protocol))),
        "uvicorn": set(dir(server)),
        "server_state": set(dir(server.server_state)),
        "lifespan": set(dir(server.lifespan)),
    }
    assert isinstance(protocol.cycle, RequestResponseCycle)
    assert isinstance(protocol.flow, FlowControl)
    for task in protocol.tasks:
        task.cancel()
    return members


class _Transport(asyncio.Transport):
    def write(self, data: bytes | bytearray | memoryview) -> None: ...


NAMED = {
    "protocol": PROTOCOL,
    "cycle": CYCLE,
    "flow": FLOW,
    "parser": PARSER,
    "uvicorn": SERVER,
    "server_state": STATE,
    "lifespan": LIFESPAN,
}


async def test_uvicorn_has_every_member_that_is_used() -> None:
    members = await _members()
    assert {owner: names - members[owner] for owner, names in NAMED.items()} == {
        owner: set[str]() for owner in NAMED
    }


async def test_every_member_that_is_used_is_named_here() -> None:
    members = await _members()
    used = {owner: set[str]() for owner in NAMED}
    for owner, name in (each for module in MODULES for each in _uses(module)):
        if name in members[owner] and not name.startswith("__"):
            used[owner].add(name)
    assert used == NAMED


def _uses(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Yield the members that a module uses or overrides, with whose they may be."""
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    owners = {"BoundedProtocol": "protocol", "HandoverProtocol": "protocol"}
    owners["UvicornServer"] = "uvicorn"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in owners:
            yield from ((owners[node.name], name) for name in _own(node))
        elif isinstance(node, ast.Attribute):
            before = node.value
            name = before.attr if isinstance(before, ast.Attribute) else getattr(before, "id", "")
            if name in NAMED:
                yield name, node.attr


def _own(of: ast.ClassDef) -> Iterator[str]:
    """Yield the members of ``self`` and ``super()`` that a class uses, and its methods."""
    for node in ast.walk(of):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Attribute):
            is_self = isinstance(node.value, ast.Name) and node.value.id == "self"
            is_super = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
            if is_self or is_super:
                yield node.attr


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_the_search_for_members_finds_some(module: ModuleType) -> None:
    assert list(_uses(module))
