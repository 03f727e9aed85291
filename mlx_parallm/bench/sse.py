"""A parser of the server-sent events in OpenAI's streams: data lines between empty lines.

See the HTML standard, section 9.2 (server-sent events), for the form.
"""

from __future__ import annotations


class SSEParser:
    """A parser that splits a stream of bytes into the data of its events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of each event that ``piece`` completes; comments are dropped."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events: list[bytes] = []
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events
