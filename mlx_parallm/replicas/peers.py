"""The other servers of a fleet: their addresses, and an HTTP client that reaches only them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx2

from mlx_parallm import __version__
from mlx_parallm.replicas.names import Lookup, PinnedNames, addresses_of
from mlx_parallm.types.errors import ConfigError, PeerRefusedError, PeerSilentError
from mlx_parallm.types.json_values import is_object

#: RELEASE_HEADER: the release of a server, in requests to peers and in their answers.
RELEASE_HEADER = "x-mlx-parallm-release"
CONNECT_S = 3.0
# MAX_CONNECTIONS: to one fleet; the OS queues what is beyond the backlog of a server.
MAX_CONNECTIONS = 64
#: MAX_JSON_BYTES: longest answer of a peer that is no content.
MAX_JSON_BYTES = 32 * 2**20
MAX_SAID_CHARS = 300
DNS = "dns"
SCHEMES = ("http", "https")
REDIRECTS = range(300, 400)
# RELEASE: the form of a version number, so that a stranger's header is not repeated in a log.
RELEASE = re.compile(r"[\w.+-]{1,40}")

#: ``Content``: a body, whole or in pieces; its length is in the headers then.
Content = bytes | AsyncGenerator[bytes] | None


@dataclass(frozen=True, slots=True, order=True)
class Peer:
    """A server that may be asked, and whose requests are heard.

    Attributes:
        url: scheme, host and port, such as ``http://10.0.0.2:8000``.
    """

    url: str

    def __str__(self) -> str:
        return self.url


@dataclass(frozen=True, slots=True)
class HostName:
    """A name whose addresses are those of peers, as a headless service has them."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class PeerList:
    """Peers as ``--peers`` lists them.

    Attributes:
        peers: those with addresses of their own, sorted.
        names: those behind names.
    """

    peers: tuple[Peer, ...] = ()
    names: tuple[HostName, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.peers or self.names)

    async def resolved(self, lookup: Lookup | None = None) -> tuple[Peer, ...]:
        """Return all peers, sorted; names that are not known now have none."""
        listed = set(self.peers)
        for name in self.names:
            listed |= {
                Peer(f"http://{_bracketed(address)}:{name.port}")
                for address in await (lookup or addresses_of)(name.host, name.port)
            }
        return tuple(sorted(listed))


def parse_peers(values: Iterable[str], flag: str = "--peers") -> PeerList:
    """Return the peers of a setting: URLs, and names as ``dns://NAME:PORT``; commas separate too.

    Raises:
        ConfigError: one is no such address, or comes twice.
    """
    peers: list[Peer] = []
    names: list[HostName] = []
    for value in ",".join(values).split(","):
        if value.startswith(f"{DNS}://"):
            names.append(_host_name(value, flag))
        else:
            peers.append(parse_peer(value, flag))
    for each in (*peers, *names):
        if (*peers, *names).count(each) > 1:
            raise ConfigError(f"{flag}: {_said(each)} comes twice.")
    return PeerList(tuple(sorted(peers)), tuple(names))


def parse_peer(value: str, flag: str = "--peers") -> Peer:
    """Return the peer of a URL; raise ConfigError if it is not scheme, host and port alone."""
    scheme, host, port = _parts(value, flag)
    if scheme not in SCHEMES:
        raise _wrong(value, flag)
    return Peer(f"{scheme}://{_bracketed(host)}:{port or (443 if scheme == 'https' else 80)}")


def _host_name(value: str, flag: str) -> HostName:
    _, host, port = _parts(value, flag)
    if port is None:
        raise ConfigError(f"{flag}: {value[:100]!r} needs a port: dns://NAME:PORT.")
    return HostName(host, port)


def _parts(value: str, flag: str) -> tuple[str, str, int | None]:
    try:
        parts = urlsplit(value)
        port = parts.port
        # No resolver knows a name with an empty label, or one of more than 63 characters.
        (parts.hostname or "").encode("idna")
    except ValueError:
        raise _wrong(value, flag) from None
    has_more = parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc
    if not parts.hostname or has_more or port == 0 or not value.isprintable() or " " in value:
        raise _wrong(value, flag)
    return parts.scheme, parts.hostname.lower(), port


def _wrong(value: str, flag: str) -> ConfigError:
    return ConfigError(
        f"{flag}: {value[:100]!r} is not the address of a server: write http://HOST:PORT, or "
        "dns://NAME:PORT."
    )


def _said(each: Peer | HostName) -> str:
    return each.url if isinstance(each, Peer) else f"dns://{_bracketed(each.host)}:{each.port}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """An answer of a peer; its status is below 300."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self, peer: Peer) -> dict[str, Any]:
        """Return the JSON object of the body; raise PeerSilentError if it is none."""
        try:
            content = json.loads(self.body)
        except (ValueError, RecursionError):
            content = None
        if not is_object(content):
            raise PeerSilentError(f"{peer} does not answer in JSON.")
        return content


@dataclass(slots=True)
class PeerClient:
    """Asks peers by HTTP: only those that are listed, directly, with the key of the fleet.

    A name is resolved once: an address that it gets later does not get the key.

    Attributes:
        key: is sent as a bearer token; None sends none.
        listed: the peers that may be asked; ``PeerList.resolved`` has them now.
        release: that of this server; peers of another one are refused.
        names: has the addresses of their names.
    """

    key: str | None = field(repr=False)
    listed: Sequence[Peer]
    release: str = __version__
    names: PinnedNames = field(default_factory=PinnedNames)
    _http: httpx2.AsyncClient | None = None

    async def pin(self) -> None:
        """Resolve the names of all peers that are listed, as far as they are known now."""
        for peer in self.listed:
            with contextlib.suppress(PeerSilentError):
                await self.names.addresses(*_place(peer))

    async def ask(
        self,
        peer: Peer,
        method: str,
        path: str,
        *,
        within_s: float | None,
        content: Content = None,
        headers: Mapping[str, str] | None = None,
        max_bytes: int = MAX_JSON_BYTES,
    ) -> PeerAnswer:
        """Return the answer of a peer.

        Args:
            peer: is listed.
            method: of HTTP.
            path: with a leading slash.
            within_s: time for all of it, down to the last byte; None lets the caller end it.
            content: the body, if there is one.
            headers: further ones.
            max_bytes: of the answer's body.

        Raises:
            PeerRefusedError: the peer refused, is of another release, or is not listed.
            PeerSilentError: it does not answer in time, or not as a server of this kind.
        """
        if peer not in self.listed:
            raise PeerRefusedError(f"{peer} is not listed as a peer; it is not asked.", status=None)
        try:
            async with asyncio.timeout(within_s):
                return await self._asked(peer, method, path, content, headers or {}, max_bytes)
        except TimeoutError:
            time = "in time" if within_s is None else f"within {within_s:g} s"
            raise PeerSilentError(f"{peer} did not answer {time}.") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as problem:
            why = str(problem)[:MAX_SAID_CHARS] or type(problem).__name__
            raise PeerSilentError(f"{peer} does not answer: {why}") from problem

    async def _asked(
        self,
        peer: Peer,
        method: str,
        path: str,
        content: Content,
        headers: Mapping[str, str],
        max_bytes: int,
    ) -> PeerAnswer:
        own = {RELEASE_HEADER: self.release, "accept-encoding": "identity"}
        if self.key is not None:
            own["authorization"] = f"Bearer {self.key}"
        request = self._client().build_request(
            method, peer.url + path, content=content, headers={**own, **headers}
        )
        response = await self._send(peer, request)
        try:
            body = bytearray()
            async for piece in response.aiter_raw():
                body += piece
                if len(body) > max_bytes:
                    raise PeerSilentError(f"{peer} answers with more than {max_bytes} bytes.")
        finally:
            await response.aclose()
        answer = PeerAnswer(response.status_code, dict(response.headers), bytes(body))
        self._check(peer, answer)
        return answer

    async def _send(self, peer: Peer, request: httpx2.Request) -> httpx2.Response:
        """Send a request to the first address of a peer that can be reached.

        Its header ``host`` and its TLS keep the name.
        """
        host, port = _place(peer)
        problem: Exception | None = None
        for address in await self.names.addresses(host, port):
            request.url = request.url.copy_with(host=address)
            request.extensions["sni_hostname"] = host
            try:
                return await self._client().send(request, stream=True)
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as cannot:
                # Nothing of the body was sent.
                problem = cannot
        await self.names.check(host, port)
        assert problem is not None, "a name has addresses"
        raise problem

    def _check(self, peer: Peer, answer: PeerAnswer) -> None:
        """Raise PeerRefusedError or PeerSilentError unless the answer is good."""
        status = answer.status
        if status in REDIRECTS:
            raise PeerSilentError(f"{peer} answers with a redirect, which is not followed.")
        release = answer.headers.get(RELEASE_HEADER)
        if release is not None and release != self.release:
            raise PeerRefusedError(other_release(peer, release, self.release), status=status)
        if status >= 500:
            raise PeerSilentError(f"{peer} answers {status}: {_failure(answer.body)[0]}")
        if status >= 300:
            message, code = _failure(answer.body)
            raise PeerRefusedError(f"{peer} refuses: {message}", status=status, code=code)
        if release is None:
            raise PeerSilentError(f"{peer} is no server of this kind.")

    def _client(self) -> httpx2.AsyncClient:
        if self._http is None:
            self._http = httpx2.AsyncClient(
                timeout=httpx2.Timeout(None, connect=CONNECT_S),
                limits=httpx2.Limits(max_connections=MAX_CONNECTIONS),
                follow_redirects=False,
                # Certificates take 50 ms to load.
                verify=any(peer.url.startswith("https") for peer in self.listed),
                # A proxy of the environment is no peer.
                trust_env=False,
            )
        return self._http

    async def close(self) -> None:
        """Close all connections."""
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()


def _place(peer: Peer) -> tuple[str, int]:
    _, host, port = _parts(peer.url, "")
    assert port is not None, "peers have ports"
    return host, port


def other_release(who: object, theirs: str, ours: str) -> str:
    """Return the refusal of a server of another release."""
    said = theirs if RELEASE.fullmatch(theirs) else "another one"
    return f"{who} is of release {said}, this server of {ours}; a fleet has one release."


def _failure(body: bytes) -> tuple[str, str | None]:
    """Return message and code of an error in OpenAI's form; of another one a piece of it."""
    try:
        failure = json.loads(body)["error"]
        code = failure.get("code")
        return str(failure["message"])[:MAX_SAID_CHARS], code if isinstance(code, str) else None
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return repr(body[:MAX_SAID_CHARS]), None
