"""Peers without a network: links that answer from a dict, or from another process's exports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mlx_parallm.generation.kv_cache.peer.exports import Exports
from mlx_parallm.generation.kv_cache.peer.filters import filter_bytes
from mlx_parallm.generation.kv_cache.peer.frames import pack_frame, pack_head
from mlx_parallm.generation.kv_cache.peer.link import Link
from mlx_parallm.generation.kv_cache.peer.peers import Links, PeerFetch, Peers
from mlx_parallm.types.content import Buffer

OWNER = "ab" * 32
UID = b"u" * 16


def frames(blocks: Sequence[tuple[bytes, Buffer]], owner: str = OWNER) -> bytes:
    """Return the answer of a server with these blocks."""
    parts = [part for content, data in blocks for part in (pack_frame(content, data), bytes(data))]
    return b"".join([pack_head(owner), *parts])


@dataclass
class DictLink(Link):
    """A peer that has blocks in a dict; ``fault`` changes its answers, or raises."""

    blocks: Mapping[bytes, Buffer]
    name: str = "http://peer:1"
    uid: bytes = UID
    fault: Callable[[bytes], bytes] = bytes
    pieces: list[Sequence[bytes]] = field(default_factory=list[Sequence[bytes]])

    async def read_filter(self) -> bytes:
        return self.uid + filter_bytes(list(self.blocks))

    async def read_blocks(self, contents: Sequence[bytes]) -> bytes:
        self.pieces.append(contents)
        here: list[tuple[bytes, Buffer]] = []
        for content in contents:
            if content not in self.blocks:
                break
            here.append((content, self.blocks[content]))
        return self.fault(frames(here))


@dataclass
class ExportLink(Link):
    """A peer in this process; ``serve`` lets its engine take a turn."""

    exports: Exports
    serve: Callable[[], object]
    name: str = "http://peer:1"

    async def read_filter(self) -> bytes:
        return await asyncio.wrap_future(self.exports.filter())

    async def read_blocks(self, contents: Sequence[bytes]) -> bytes:
        answer = self.exports.ask(contents)
        while not answer.done():
            self.serve()
        blocks = map(bytes, answer.result())
        return frames(list(zip(contents, blocks, strict=False)), self.exports.owner)


def listed(*links: Link) -> Links:
    """Return what lists these links."""

    async def list_links() -> Sequence[Link]:
        return links

    return list_links


def read(peers: Peers, contents: Sequence[bytes]) -> list[bytes]:
    """Return what a fetch of the blocks that ``find`` finds brings."""
    count, name = peers.find(contents)
    fetch = PeerFetch()
    asyncio.run(peers.read(name, contents[:count], fetch))
    assert fetch.is_done
    return [bytes(block) for block in fetch.result()]
