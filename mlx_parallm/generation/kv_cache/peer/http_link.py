"""Peers that are asked by HTTP."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mlx_parallm.generation.kv_cache.peer.filters import FILTER_BYTES, UID_BYTES
from mlx_parallm.generation.kv_cache.peer.frames import FRAME_BYTES, HEAD_BYTES
from mlx_parallm.generation.kv_cache.peer.link import Link, LinkError
from mlx_parallm.generation.kv_cache.peer.prefill import PrefillLink, Prompt
from mlx_parallm.generation.kv_cache.peer.thread import PeerThread
from mlx_parallm.replicas.peers import Peer, PeerClient, parse_peer, parse_peers
from mlx_parallm.types.errors import PeerRefusedError, PeerSilentError

#: ``FILTER_PATH``, ``BLOCKS_PATH``, ``PREFILL_PATH``: routes of ``api.kv``.
FILTER_PATH, BLOCKS_PATH, PREFILL_PATH = "/v1/kv/filter", "/v1/kv/blocks", "/v1/kv/prefill"
FLAG, PREFILL_FLAG = "--kv-peers", "--prefill-peer"
# ANSWER_BYTES: most of an answer without blocks.
ANSWER_BYTES = 64 * 1024
# BUSY: statuses of a peer that may compute later: a full queue, a pause, an engine that starts.
BUSY = frozenset({429, 503})
# OTHER: status of a peer without these weights.
OTHER = 404
JSON = {"content-type": "application/json"}


class HttpLink(Link, PrefillLink):
    """Asks one peer for blocks of one model."""

    def __init__(self, client: PeerClient, peer: Peer, owner: str, num_bytes: int) -> None:
        """``owner``: digest of the model's ``Identity``; ``num_bytes``: the size of a block."""
        self.name = peer.url
        self._client = client
        self._peer = peer
        self._owner = owner
        self._num_bytes = num_bytes

    async def read_filter(self) -> bytes:
        """See ``Link``."""
        path = f"{FILTER_PATH}?owner={self._owner}"
        return await self._ask("GET", path, None, UID_BYTES + FILTER_BYTES)

    async def read_blocks(self, contents: Sequence[bytes]) -> bytes:
        """See ``Link``."""
        return await self._blocks(contents, waits=False)

    async def await_blocks(self, contents: Sequence[bytes]) -> bytes:
        """See ``PrefillLink``."""
        return await self._blocks(contents, waits=True)

    async def prefill(self, prompt: Prompt) -> None:
        """See ``PrefillLink``."""
        wanted = json.dumps({"owner": self._owner, **asdict(prompt)}).encode()
        await self._ask("POST", PREFILL_PATH, wanted, ANSWER_BYTES)

    async def _blocks(self, contents: Sequence[bytes], *, waits: bool) -> bytes:
        wanted: dict[str, Any] = {"owner": self._owner, "contents": [c.hex() for c in contents]}
        if waits:
            wanted["waits"] = True
        most = HEAD_BYTES + len(contents) * (FRAME_BYTES + self._num_bytes)
        return await self._ask("POST", BLOCKS_PATH, json.dumps(wanted).encode(), most)

    async def _ask(self, method: str, path: str, body: bytes | None, max_bytes: int) -> bytes:
        headers = None if body is None else JSON
        try:
            answer = await self._client.ask(
                *(self._peer, method, path),
                within_s=None,
                content=body,
                headers=headers,
                max_bytes=max_bytes,
            )
        except PeerRefusedError as problem:
            raise LinkError(str(problem), _reason(problem)) from problem
        except PeerSilentError as problem:
            raise LinkError(str(problem)) from problem
        return answer.body


class HttpLinks:
    """The links to all peers that are listed; call it to have them now."""

    def __init__(self, urls: Sequence[str], key: str | None, owner: str, num_bytes: int) -> None:
        """``urls`` and ``key``: of the peers; ``owner`` and ``num_bytes``: see ``HttpLink``."""
        self._peers = parse_peers(urls, FLAG)
        self._model = owner, num_bytes
        self._client = PeerClient(key, ())

    async def __call__(self) -> Sequence[Link]:
        """Return the links; names are looked up anew."""
        self._client.listed = await self._peers.resolved()
        return [HttpLink(self._client, peer, *self._model) for peer in self._client.listed]

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()


def prefill_link(
    url: str, key: str | None, owner: str, num_bytes: int
) -> tuple[HttpLink, PeerThread]:
    """Return the link to the server of ``--prefill-peer``, and the thread that asks it."""
    peer = parse_peer(url, PREFILL_FLAG)
    client = PeerClient(key, (peer,))
    # Its address is that of the start, whenever the first prompt comes.
    return HttpLink(client, peer, owner, num_bytes), PeerThread(client.close, client.pin())


def _reason(problem: PeerRefusedError) -> str:
    if problem.status in BUSY:
        return "busy"
    return "other_weights" if problem.status == OTHER else "refused"
