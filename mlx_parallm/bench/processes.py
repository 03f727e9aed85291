"""A load, sent by this process or by several ``python -m mlx_parallm.bench.processes``.

A process reads so many chunks a second and no more: with a faster server it measures itself.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from mlx_parallm.bench.client import LoadClient
from mlx_parallm.bench.http_stream import Target
from mlx_parallm.bench.load import closed_loop, open_loop
from mlx_parallm.bench.record import PlannedRequest, RequestRecord
from mlx_parallm.peers.channel import Channel
from mlx_parallm.peers.child_process import ChildProcess
from mlx_parallm.types.errors import ConfigError

# READY, GO: what a process says once it has its load, and hears once all have theirs.
READY, GO = "ready", "go"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests, and how they are sent to a server.

    Attributes:
        target: the server.
        requests: in their order.
        concurrency: clients of a closed loop, or most requests of an open loop in flight; None: as
            many as there are requests.
        is_open: True to send each request at its own time.
        ramp_s: seconds over which the clients of a closed loop start.
        timeout_s: of a request.
        api_key: sent as a bearer token.
        headers: sent with each request.
    """

    target: Target
    requests: Sequence[PlannedRequest]
    concurrency: int | None = None
    is_open: bool = False
    ramp_s: float = 0.0
    timeout_s: float = 600.0
    api_key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)

    @property
    def client(self) -> LoadClient:
        """A client of the server."""
        return LoadClient(
            self.target, api_key=self.api_key, timeout_s=self.timeout_s, headers=self.headers
        )

    async def send(self) -> list[RequestRecord]:
        """Send the requests; return their records, in their order."""
        send, count = self.client.send, self.concurrency
        if self.is_open:
            return await open_loop(self.requests, send, max_concurrency=count)
        count = count or max(1, len(self.requests))
        return await closed_loop(self.requests, send, concurrency=count, ramp_s=self.ramp_s)

    def shares(self, count: int) -> list[Load]:
        """Return the shares of so many processes: of the clients, and of requests for each client.

        Raises:
            ConfigError: there are fewer clients than processes.
        """
        clients = range(self.concurrency or len(self.requests))
        if len(clients) < count:
            raise ConfigError(
                f"--processes {count} needs as many clients; there are {len(clients)}."
            )
        owners = [index % len(clients) % count for index in range(len(self.requests))]
        return [
            replace(
                self,
                requests=[
                    request
                    for request, owner in zip(self.requests, owners, strict=True)
                    if owner == process
                ],
                concurrency=len(clients[process::count]) if self.concurrency else None,
            )
            for process in range(count)
        ]


def send_by_processes(load: Load, count: int) -> list[RequestRecord]:
    """Send a load from several processes, which begin together; return the records in order.

    Their times can be compared: Linux and macOS have one monotonic clock for all processes.

    Raises:
        ConfigError: there are fewer clients than processes, or a process ended.
    """
    shares = load.shares(count)
    with ExitStack() as stack:
        channels = [_start(stack) for _ in shares]
        try:
            for channel, share in zip(channels, shares, strict=True):
                channel.send(share)
            for channel in channels:
                channel.receive()
            for channel in channels:
                channel.send(GO)
            records = [record for channel in channels for record in channel.receive()[0]]
        except (OSError, EOFError) as error:
            raise ConfigError("a process of --processes ended before its load did.") from error
    return sorted(records, key=lambda record: record.index)


def _start(stack: ExitStack) -> Channel:
    """Start a process that ends with the stack; return the channel to it."""
    ours, theirs = socket.socketpair()
    with theirs:
        channel = Channel(ours)
        stack.callback(channel.close)
        process = ChildProcess([__name__, str(theirs.fileno())], pass_fds=(theirs.fileno(),))
    stack.callback(process.wait)
    stack.callback(process.close_link)
    return channel


def main(descriptor: str) -> None:
    """Send the load that comes over an inherited socket, and answer with its records."""
    # Ctrl-C reaches all processes of a terminal; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(descriptor)))
    load, _ = channel.receive()
    channel.send(READY)
    channel.receive()
    channel.send(asyncio.run(load.send()))
    channel.close()


if __name__ == "__main__":
    main(sys.argv[1])
