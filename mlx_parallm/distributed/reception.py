"""Accepts the connections of all followers, and of no other process."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection

from mlx_parallm.peers.handshake import Caller, StreamKind
from mlx_parallm.peers.network import Acceptor
from mlx_parallm.types.errors import ConfigError

# KINDS: the connections of each follower.
KINDS = (StreamKind.LOG, StreamKind.BEATS)


class Reception:
    """Waits for the followers' connections."""

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        callers: Collection[Caller],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take over a listening socket; see ``Acceptor``.

        ``callers``: all connections that must come.
        """
        self._missing = set(callers)
        self._clock = clock
        self._acceptor = Acceptor(listener, secret, self._refusal, "the ranks' port", clock)

    def _refusal(self, caller: Caller) -> str | None:
        is_missing = caller in self._missing
        return None if is_missing else f"rank {caller.number} has joined, or is none"

    def wait(self, timeout_s: float) -> dict[Caller, socket.socket]:
        """Return the connections once all have come; then nobody listens any more.

        Raises:
            ConfigError: some ranks are missing after ``timeout_s``.
        """
        joined: dict[Caller, socket.socket] = {}
        try:
            for caller, end in self._acceptor.welcomed(self._clock() + timeout_s):
                self._missing.remove(caller)
                joined[caller] = end
                if not self._missing:
                    break
        finally:
            self._acceptor.close("time is up" if self._missing else "all ranks have joined")
        if self._missing:
            for end in joined.values():
                end.close()
            raise ConfigError(_missing_ranks(self._missing, timeout_s))
        return joined


def all_callers(size: int) -> set[Caller]:
    """Return the connections that rank 0 of ``size`` ranks waits for."""
    return {Caller(rank, kind) for rank in range(1, size) for kind in KINDS}


def _missing_ranks(missing: Collection[Caller], timeout_s: float) -> str:
    ranks = sorted({caller.number for caller in missing})
    names = ", ".join(map(str, ranks))
    verb = "Rank {} has" if len(ranks) == 1 else "Ranks {} have"
    return (
        f"{verb.format(names)} not joined rank 0 within {timeout_s:g} s. Check that every rank "
        "runs, and that it can reach rank 0's port."
    )
