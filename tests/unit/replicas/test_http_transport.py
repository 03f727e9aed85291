"""Peers that answer the questions of a fleet with something else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mlx_parallm import __version__
from mlx_parallm.replicas.entries import Entry
from mlx_parallm.replicas.http_transport import HttpTransport
from mlx_parallm.replicas.past import Past
from mlx_parallm.replicas.peers import RELEASE_HEADER, Peer, PeerClient, parse_peer
from mlx_parallm.replicas.transport import StateQuery
from mlx_parallm.types.errors import ParallmError, PeerRefusedError, PeerSilentError

ENTRY = Entry(1, "", {"kind": "resume"}, None, "http://a:1")
STATE = {
    "instance": "x",
    "number": 1,
    "digest": "d",
    "seen": 1,
    "staged": None,
    "knows": False,
    "why": None,
    "members": {},
    "versions": {},
    "models": {},
}
Ask = Callable[[HttpTransport, Peer], Awaitable[Any]]
QUESTIONS: dict[str, Ask] = {
    "state": lambda transport, peer: transport.state(peer, StateQuery("", "holding")),
    "journal": lambda transport, peer: transport.past(peer),
    "stage": lambda transport, peer: transport.stage(peer, ENTRY, b"tensors"),
    "commit": lambda transport, peer: transport.commit(peer, "digest"),
    "drop": lambda transport, peer: transport.drop(peer, "digest"),
    "content": lambda transport, peer: transport.content(peer, "digest"),
}


async def answered(ask: Ask, answer: bytes) -> Any:
    """Return the result of a question to a peer that sends these bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        for line in head.lower().splitlines():
            if line.startswith(b"content-length:"):
                await reader.readexactly(int(line.partition(b":")[2]))
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    peer = parse_peer(f"http://{host}:{port}")
    client = PeerClient("key", [peer])
    try:
        return await ask(HttpTransport(client, 1000), peer)
    finally:
        await client.close()
        server.close()


def good(content: bytes, status: str = "200 OK") -> bytes:
    release = f"{RELEASE_HEADER}: {__version__}"
    return (
        f"HTTP/1.1 {status}\r\n{release}\r\ncontent-length: {len(content)}\r\n\r\n".encode()
        + content
    )


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", PeerSilentError),
        (b"garbage\r\n\r\n", PeerSilentError),
        (good(b"half of it")[:-3], PeerSilentError),
        (good(b"", "404 Not Found"), PeerRefusedError),
        (good(b"", "401 Unauthorized"), PeerRefusedError),
        (good(b"", "307 Temporary Redirect"), PeerSilentError),
        (good(b"", "503 Service Unavailable"), PeerSilentError),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", PeerSilentError),
        (good(b"{}").replace(__version__.encode(), b"0.0.1"), PeerRefusedError),
    ],
)
async def test_other_answers_are_refusals(
    question: str, answer: bytes, kind: type[ParallmError]
) -> None:
    with pytest.raises(kind):
        await answered(QUESTIONS[question], answer)


async def test_good_answers_are_read() -> None:
    state = await answered(QUESTIONS["state"], good(json.dumps(STATE).encode()))
    assert (state.number, state.digest) == (1, "d")
    past = Past(1, "d", 7, (ENTRY,), ["c"])
    answer = await answered(QUESTIONS["journal"], good(json.dumps(past.to_json()).encode()))
    assert answer == past
    assert await answered(QUESTIONS["content"], good(b"tensors")) == b"tensors"


@pytest.mark.parametrize("name", STATE)
async def test_states_with_wrong_fields_are_no_states(name: str) -> None:
    for value in ([], 1.5):
        body = json.dumps({**STATE, name: value}).encode()
        with pytest.raises(PeerSilentError, match="as a server of a fleet"):
            await answered(QUESTIONS["state"], good(body))


@pytest.mark.parametrize("name", ["members", "versions", "models"])
@pytest.mark.parametrize("value", [{"url": 5}, {"url": None}, {"url": {"a": 1}}, {"url": []}])
async def test_tables_of_states_have_texts(name: str, value: object) -> None:
    body = json.dumps({**STATE, name: value}).encode()
    with pytest.raises(PeerSilentError, match="as a server of a fleet"):
        await answered(QUESTIONS["state"], good(body))


async def test_peers_that_serve_another_model_are_refused() -> None:
    body = json.dumps({**STATE, "models": {"m": "a.b"}}).encode()
    with pytest.raises(PeerRefusedError, match="cannot be compared yet"):
        await answered(QUESTIONS["state"], good(body))


@pytest.mark.parametrize("journal", [None, 3, [3], [{}], [{**ENTRY.to_json(), "head": {}}]])
async def test_journals_that_cannot_be_read_are_refused(journal: object) -> None:
    past = Past(1, "d", 7, (), []).to_json()
    body = json.dumps({**past, "journal": journal}).encode()
    with pytest.raises(PeerSilentError):
        await answered(QUESTIONS["journal"], good(body))


@pytest.mark.parametrize("ancestors", [None, 3, "ab", [3], [None], {}])
async def test_ancestors_that_cannot_be_read_are_refused(ancestors: object) -> None:
    past = Past(1, "d", 7, (ENTRY,), []).to_json()
    body = json.dumps({**past, "ancestors": ancestors}).encode()
    with pytest.raises(PeerSilentError):
        await answered(QUESTIONS["journal"], good(body))


async def test_contents_are_bounded() -> None:
    with pytest.raises(PeerSilentError, match="more than 1000 bytes"):
        await answered(QUESTIONS["content"], good(bytes(1001)))
