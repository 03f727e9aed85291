"""Addresses of peers, and the client that asks only them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from mlx_parallm import __version__
from mlx_parallm.replicas.peers import (
    RELEASE_HEADER,
    HostName,
    Peer,
    PeerClient,
    PeerList,
    parse_peer,
    parse_peers,
)
from mlx_parallm.types.errors import ConfigError, ParallmError, PeerRefusedError, PeerSilentError

HEAD = f"HTTP/1.1 200 OK\r\n{RELEASE_HEADER}: {__version__}\r\n".encode()
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def test_urls_are_normalised_and_sorted() -> None:
    peers = parse_peers(["http://B:80/", "http://a", "https://[::1]", "dns://fleet:8000"])
    urls = [peer.url for peer in peers.peers]
    assert urls == ["http://a:80", "http://b:80", "https://[::1]:443"]
    assert peers.names == (HostName("fleet", 8000),)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "host:80",
        "ftp://host",
        "http://",
        "http://host/path",
        "http://host?x=1",
        "http://user@host",
        "http://host:0",
        "http://host:x",
        "http://host:99999",
        "http://[::1",
        "http://ho st",
        "http://host\n",
        "dns://name",
        "dns://:80",
        "dns://kv..cluster:8000",
        "http://kv..cluster:8000",
        f"dns://{'a' * 64}:8000",
    ],
)
def test_bad_addresses_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"--peers: "):
        parse_peers([value])


@pytest.mark.parametrize("twice", ["http://host:80", "dns://host:80"])
def test_a_peer_comes_once(twice: str) -> None:
    with pytest.raises(ConfigError, match="comes twice"):
        parse_peers([twice, twice])


async def test_names_are_asked_for_each_time() -> None:
    answers = [["10.0.0.2", "10.0.0.1"], [], ["::1"]]

    async def lookup(_host: str, _port: int) -> list[str]:
        return answers.pop(0)

    peers = PeerList(names=(HostName("fleet", 8000),))
    assert [str(peer) for peer in await peers.resolved(lookup)] == [
        "http://10.0.0.1:8000",
        "http://10.0.0.2:8000",
    ]
    assert await peers.resolved(lookup) == ()
    assert await peers.resolved(lookup) == (Peer("http://[::1]:8000"),)


async def ask(serve: Serve, *, is_listed: bool = True, within_s: float = 5.0) -> bytes:
    """Return the body that a peer answers, whose server calls ``serve`` with a connection."""

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await serve(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    peer = parse_peer(f"http://{host}:{port}")
    client = PeerClient("secret", [peer] if is_listed else [])
    try:
        answer = await client.ask(peer, "GET", "/x", within_s=within_s, max_bytes=100)
        answer.json(peer)
        return answer.body
    finally:
        await client.close()
        server.close()


def saying(*pieces: bytes) -> Serve:
    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.writelines(pieces)
        await writer.drain()

    return serve


async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"content-length: 90\r\n\r\n{")
    await reader.read()


async def test_a_good_answer_is_returned() -> None:
    assert await ask(saying(HEAD + b"content-length: 2\r\n\r\n{}")) == b"{}"


@pytest.mark.parametrize(
    ("serve", "kind", "match"),
    [
        (saying(b"garbage\r\n\r\n"), PeerSilentError, "does not answer"),
        (saying(), PeerSilentError, "does not answer"),
        (saying(HEAD + b"content-length: 9\r\n\r\n{}"), PeerSilentError, "does not answer"),
        (saying(HEAD + b"content-length: 2\r\n\r\n[]"), PeerSilentError, "in JSON"),
        (saying(HEAD + b"content-length: 2\r\n\r\n\xff["), PeerSilentError, "in JSON"),
        (
            saying(HEAD + b"content-length: 101\r\n\r\n" + b" " * 101),
            PeerSilentError,
            "more than 100 bytes",
        ),
        (saying(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"), PeerSilentError, "no server"),
        (
            saying(b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\n\r\n"),
            PeerSilentError,
            "redirect",
        ),
        (
            saying(b"HTTP/1.1 200 OK\r\nx-mlx-parallm-release: 0.0.1\r\n\r\n{}"),
            PeerRefusedError,
            rf"of release 0\.0\.1, this server of {__version__}",
        ),
        (
            saying(HEAD.replace(b"200", b"404") + b"content-length: 0\r\n\r\n"),
            PeerRefusedError,
            "b''",
        ),
        (
            saying(
                HEAD.replace(b"200", b"401")
                + b'content-length: 37\r\n\r\n{"error":{"message":"no key at all"}}'
            ),
            PeerRefusedError,
            "no key at all",
        ),
        (saying(HEAD.replace(b"200", b"500") + b"\r\n"), PeerSilentError, "500"),
    ],
)
async def test_other_answers_are_refusals(
    serve: Serve, kind: type[ParallmError], match: str
) -> None:
    with pytest.raises(kind, match=match):
        await ask(serve)


async def test_a_slow_answer_ends_in_time() -> None:
    with pytest.raises(PeerSilentError, match=r"within 0\.05 s"):
        await ask(stall, within_s=0.05)


async def test_an_answer_without_a_limit_may_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def times_out(*_args: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(PeerClient, "_asked", times_out)
    peer = parse_peer("http://host:80")
    with pytest.raises(PeerSilentError, match="did not answer in time"):
        await PeerClient(None, [peer]).ask(peer, "GET", "/x", within_s=None)


async def test_strangers_are_not_asked() -> None:
    with pytest.raises(PeerRefusedError, match="not listed"):
        await ask(saying(HEAD + b"content-length: 2\r\n\r\n{}"), is_listed=False)


def test_the_key_is_not_shown() -> None:
    assert "secret" not in repr(PeerClient("secret", []))
