"""Questions and changes to peers by HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from mlx_parallm.replicas.entries import Entry
from mlx_parallm.replicas.frames import pack_head, pieces
from mlx_parallm.replicas.host import Content
from mlx_parallm.replicas.past import Past
from mlx_parallm.replicas.peers import Peer, PeerAnswer, PeerClient
from mlx_parallm.replicas.served import ServedModels
from mlx_parallm.replicas.transport import PeerState, StateQuery
from mlx_parallm.types.errors import InvalidRequestError, PeerRefusedError, PeerSilentError

# STATE_S: time that a peer has to say how it is; it takes longer only if it is in trouble.
STATE_S = 3.0
# CHECK_S: seconds between two looks at whether a peer that takes long is alive.
CHECK_S = 1.0
PREFIX = "/v1/peers"
CONTENTS = "/v1/contents"

#: ``IsAlive``: True if a peer has answered lately.
IsAlive = Callable[[Peer], bool]


@dataclass(slots=True)
class HttpTransport:
    """Implements ``Transport``. What may take long ends when its peer is no longer alive.

    Attributes:
        client: asks.
        max_bytes: of the tensors of a change.
        is_alive: True to go on waiting for a peer.
        served: the models of this server; peers with others are refused.
    """

    client: PeerClient
    max_bytes: int
    is_alive: IsAlive = lambda _: True
    served: ServedModels = field(default_factory=lambda: ServedModels(()))

    async def state(self, peer: Peer, query: StateQuery) -> PeerState:
        """See ``Transport``."""
        path = f"{PREFIX}/state?digest={query.digest}"
        if query.holding is not None:
            path += f"&holding={query.holding}"
        answer = await self.client.ask(peer, "GET", path, within_s=STATE_S)
        state = PeerState.from_json(peer, answer.json(peer))
        difference = self.served.difference(state.models)
        if difference is not None:
            raise PeerRefusedError(f"{peer} {difference}.", status=None)
        return state

    async def reserve(self, peer: Peer, entry: Entry) -> None:
        """See ``Transport``."""
        await self._send(peer, "reserve", entry, None)

    async def stage(self, peer: Peer, entry: Entry, content: Content | None) -> None:
        """See ``Transport``."""
        await self._send(peer, "stage", entry, content)

    async def _send(self, peer: Peer, step: str, entry: Entry, content: Content | None) -> None:
        head = pack_head(entry)
        length = len(head) + len(content or b"")
        headers = {"content-type": "application/octet-stream", "content-length": str(length)}
        await self._ask_long(
            peer, "POST", f"{PREFIX}/{step}", content=pieces(head, content), headers=headers
        )

    async def commit(self, peer: Peer, digest: str) -> None:
        """See ``Transport``."""
        await self._ask_long(peer, "POST", f"{PREFIX}/commit?digest={digest}")

    async def drop(self, peer: Peer, digest: str) -> None:
        """See ``Transport``."""
        await self.client.ask(peer, "POST", f"{PREFIX}/drop?digest={digest}", within_s=STATE_S)

    async def past(self, peer: Peer) -> Past:
        """See ``Transport``."""
        answer = await self.client.ask(peer, "GET", f"{PREFIX}/journal", within_s=10 * STATE_S)
        try:
            return Past.from_json(answer.json(peer))
        except InvalidRequestError:
            raise PeerSilentError(f"{peer} has a journal that cannot be read.") from None

    async def content(self, peer: Peer, digest: str) -> bytes:
        """See ``Transport``."""
        answer = await self._ask_long(peer, "GET", f"{CONTENTS}/{digest}", max_bytes=self.max_bytes)
        return answer.body

    async def _ask_long(self, peer: Peer, method: str, path: str, **options: object) -> PeerAnswer:
        """Return the answer to what may take as long as a load, while the peer is alive."""
        work = self.client.ask(peer, method, path, within_s=None, **options)  # pyright: ignore[reportArgumentType]
        asking = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([asking], timeout=CHECK_S))[0]:
                if not self.is_alive(peer):
                    raise PeerSilentError(f"{peer} no longer answers.")
            return asking.result()
        finally:
            asking.cancel()
