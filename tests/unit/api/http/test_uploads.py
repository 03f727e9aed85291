"""Digests of bodies: computed while these are received, and given up with their requests."""

from __future__ import annotations

import hashlib
import threading

import pytest

from mlx_parallm.api.http import uploads
from mlx_parallm.api.http.uploads import BodyDigest
from mlx_parallm.types.content import Buffer


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1000])
@pytest.mark.parametrize("backlog", [0, 1 << 20])
def test_a_body_in_pieces_has_the_digest_of_the_whole(
    size: int, backlog: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "PIECE_BYTES", 100)
    monkeypatch.setattr(uploads, "BACKLOG_BYTES", backlog)
    body = bytearray(number % 251 for number in range(size))
    for step in (1, 7, 100, 333):
        hashing = BodyDigest()
        for start in range(0, size, step):
            hashing.add(bytes(body[start : start + step]))
        assert hashing.finish(body).result() == hashlib.sha256(body).hexdigest()
    assert BodyDigest().finish(body).result() == hashlib.sha256(body).hexdigest()
    assert BodyDigest().finish(b"a", body).result() == hashlib.sha256(b"a" + body).hexdigest()


def test_a_receiver_never_waits_for_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a thread that does not come to its turn, little more than the backlog is kept."""
    monkeypatch.setattr(uploads, "PIECE_BYTES", 10)
    monkeypatch.setattr(uploads, "BACKLOG_BYTES", 50)
    goes_on = threading.Event()
    hashing = BodyDigest()
    hashing._thread.submit(goes_on.wait)
    body = bytes(range(200))
    for start in range(0, len(body), 5):
        hashing.add(body[start : start + 5])
    assert hashing._given == 60
    assert not hashing._pieces
    digest = hashing.finish(body)
    assert not digest.done()
    goes_on.set()
    assert digest.result() == hashlib.sha256(body).hexdigest()


def test_a_closed_digest_lets_go_of_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than the piece that is being hashed is read, whether or not the body has ended."""
    monkeypatch.setattr(uploads, "PIECE_BYTES", 10)
    hashing = BodyDigest()
    begun, goes_on = threading.Event(), threading.Event()

    class Blocked:
        """Waits in its first piece."""

        num_bytes = 0

        def update(self, piece: Buffer) -> None:
            self.num_bytes += len(piece)
            begun.set()
            goes_on.wait()

    hashing._digest = blocked = Blocked()  # type: ignore[assignment]
    body = bytearray(1000)
    for start in range(0, 100, 10):
        hashing.add(bytes(body[start : start + 10]))
    digest = hashing.finish(body)
    begun.wait()
    hashing.close()
    goes_on.set()
    assert digest.result() is None
    assert blocked.num_bytes == 10
    hashing._thread.shutdown()
    # A bytearray that something still reads cannot grow.
    body += b"x"
