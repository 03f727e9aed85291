"""A TCP proxy whose answers come at a bounded rate, as over a slow link."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

# PIECE_S: a piece is what the link sends in such a time.
PIECE_S = 0.01
LEAST_PIECE = 256
CHUNK = 1 << 16


class PacedProxy:
    """Passes connections to a port of the loopback interface on.

    Attributes:
        rate: most bytes of answers a second, of all connections together; None for no limit. 0
            sends nothing.
        target: the port.
        port: its own.
        num_bytes: bytes of answers that it has sent.
    """

    def __init__(self, target: int, rate: float | None = None) -> None:
        self.rate = rate
        self.num_bytes = 0
        self.target = target
        self._lock = threading.Lock()
        self._free_s = 0.0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        """Accept no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        address = ("127.0.0.1", self.target)
        with contextlib.suppress(OSError), client, socket.create_connection(address) as server:
            back = threading.Thread(target=self._send_back, args=(server, client), daemon=True)
            back.start()
            with contextlib.suppress(OSError):
                while data := client.recv(CHUNK):
                    server.sendall(data)
                server.shutdown(socket.SHUT_WR)
            back.join()

    def _send_back(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(CHUNK):
                for piece in self._paced(data):
                    client.sendall(piece)
                    self.num_bytes += len(piece)
            client.shutdown(socket.SHUT_WR)

    def _paced(self, data: bytes) -> Iterator[bytes]:
        """Yield pieces of an answer, each once the link is free."""
        start = 0
        while start < len(data):
            while self.rate == 0:
                time.sleep(PIECE_S)
            size = len(data) - start
            if (rate := self.rate) is not None:
                size = min(size, max(LEAST_PIECE, int(rate * PIECE_S)))
                with self._lock:
                    now_s = time.monotonic()
                    begin_s = max(now_s, self._free_s)
                    self._free_s = begin_s + size / rate
                time.sleep(max(0.0, begin_s - now_s))
            yield data[start : start + size]
            start += size
