"""Clients on plain sockets, which cost little beside the server that they measure.

``python -m benchmarks.raw_clients PORT PATH BODY.json --clients 32 --seconds 10`` sends a body over
and over, in a process of its own, and prints its figures as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import selectors
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import BenchmarkError
from mlx_parallm.bench.statistics import percentile
from mlx_parallm.peers.child_process import ChildProcess

EVENT = b"data: {"
LAST_CHUNK = b"0\r\n\r\n"
JSON_TYPE = "application/json"


def post(path: str, content: bytes, content_type: str = JSON_TYPE) -> bytes:
    """Return a request with a body."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {content_type}\r\n"
        "Authorization: Bearer none\r\nUser-Agent: benchmark\r\nAccept: */*\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def json_post(path: str, body: dict[str, Any]) -> bytes:
    """Return a request with a JSON body."""
    return post(path, json.dumps(body).encode())


def get(path: str) -> bytes:
    """Return a request without a body."""
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: */*\r\n\r\n".encode()


class Clients:
    """Connections that each send a request again once it is answered."""

    def __init__(self, port: int, count: int, request: bytes) -> None:
        """Connect ``count`` clients."""
        self._request = request
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
        self._received: dict[socket.socket, bytearray] = {}
        self._sent_s: dict[socket.socket, float] = {}
        self._selector = selectors.DefaultSelector()
        for connection in self._sockets:
            self._selector.register(connection, selectors.EVENT_READ)

    def answers(self, count: int) -> list[float]:
        """Send so many requests; return the seconds until the answer of each."""
        left = count - len(self._sockets)

        def takes_another() -> bool:
            nonlocal left
            left -= 1
            return left >= 0

        return self._answers(takes_another)

    def answers_within(self, seconds: float) -> list[float]:
        """Send requests for so long; return the seconds until the answer of each."""
        end_s = time.perf_counter() + seconds
        return self._answers(lambda: time.perf_counter() < end_s)

    def _answers(self, takes_another: Callable[[], bool]) -> list[float]:
        for connection in self._sockets:
            self._send(connection)
        num_open, latencies = len(self._sockets), list[float]()
        while num_open:
            for connection in self._readable():
                if not _is_whole(self._received[connection]):
                    continue
                latencies.append(time.perf_counter() - self._sent_s[connection])
                if takes_another():
                    self._send(connection)
                else:
                    num_open -= 1
        return latencies

    def events(self, num_skipped: int, on_skipped: Callable[[], None]) -> int:
        """Stream one answer on each connection; return the number of events after the skipped."""
        for connection in self._sockets:
            self._send(connection)
        count, counted, open_streams, has_skipped = 0, 0, len(self._sockets), False
        while open_streams:
            for connection in self._readable():
                received = self._received[connection]
                count += received.count(EVENT)
                open_streams -= received.endswith(LAST_CHUNK)
                # Too little for an event; the last chunk may have come in two pieces.
                del received[: 1 - len(LAST_CHUNK)]
            if not has_skipped and count >= num_skipped:
                has_skipped, counted = True, count
                on_skipped()
        return count - counted

    def _send(self, connection: socket.socket) -> None:
        self._received[connection] = bytearray()
        self._sent_s[connection] = time.perf_counter()
        connection.sendall(self._request)

    def _readable(self) -> Iterator[socket.socket]:
        for key, _ in self._selector.select():
            connection: Any = key.fileobj
            data = connection.recv(1 << 20)
            if not data:
                raise BenchmarkError("the server closed a connection")
            received = self._received[connection]
            if not received and not data.startswith(b"HTTP/1.1 200") and b"HTTP/1.1" in data[:9]:
                raise BenchmarkError(data[:500].decode(errors="replace"))
            received += data
            yield connection

    def close(self) -> None:
        """Close the connections."""
        self._selector.close()
        for connection in self._sockets:
            connection.close()


def _is_whole(answer: bytearray) -> bool:
    head, separator, content = answer.partition(b"\r\n\r\n")
    if not separator:
        return False
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return len(content) >= int(length)


def start_clients(port: int, path: str, body: Path, *options: object) -> ChildProcess:
    """Start this module in a process of its own."""
    target = ["benchmarks.raw_clients", str(port), path, str(body), *map(str, options)]
    return ChildProcess(target, stdout=subprocess.PIPE)


def figures_of(process: ChildProcess) -> dict[str, float]:
    """Wait for a client process and return its figures; raise BenchmarkError if it failed."""
    output, _ = process.communicate()
    if process.returncode or not output:
        raise BenchmarkError("a process of clients failed")
    return json.loads(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("path")
    parser.add_argument("body", type=Path)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    clients = Clients(args.port, args.clients, post(args.path, args.body.read_bytes()))
    with contextlib.closing(clients):
        begin_s = time.perf_counter()
        latencies = clients.answers_within(args.seconds)
        seconds = time.perf_counter() - begin_s
    figures = {
        "requests_per_s": len(latencies) / seconds,
        "p50_ms": 1000 * percentile(latencies, 50),
        "p99_ms": 1000 * percentile(latencies, 99),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
