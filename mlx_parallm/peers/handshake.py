"""The proof that both ends of a new connection know the same secret and are of one release.

Nothing is unpickled before it. The caller says who it is and sends a nonce; the other end answers
with a nonce of its own and a proof; the caller answers with its proof, and is welcomed. A proof is
an HMAC-SHA-256 over everything that was said before, so that it fits no other connection, caller or
role. Releases are compared last: another one is named only to who knows the secret.

Both sides are generators that read and write nothing themselves, so that one thread can serve
many connections: they yield what to send and how many bytes to read next.
"""

from __future__ import annotations

import hmac
import os
import struct
from collections.abc import Generator
from dataclasses import dataclass
from enum import IntEnum

from mlx_parallm import __version__

SECRET_BYTES = NONCE_BYTES = PROOF_BYTES = VERSION_BYTES = 32
# HELLO: the protocol, the caller's number, the stream, its release, and a nonce. All releases keep
# this form, so that they can name each other.
HELLO = struct.Struct(f"<8sQB{VERSION_BYTES}s{NONCE_BYTES}s")
ANSWER_BYTES = VERSION_BYTES + NONCE_BYTES + PROOF_BYTES
PROTOCOL = b"parallm2"
WELCOME = b"W"


class StreamKind(IntEnum):
    """The use of a connection."""

    #: Ops and replies between rank 0 and a follower.
    LOG = 0
    #: Beats between them.
    BEATS = 1
    #: A server and an engine that is started for it.
    ENGINE = 2


class StrangerError(Exception):
    """The other end is none of ours, or does not know the secret."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Bytes to send, and how many to read then."""

    send: bytes
    size: int


@dataclass(frozen=True, slots=True)
class Caller:
    """Who has proven to know the secret.

    Attributes:
        number: a follower's rank, or a number that a server keeps for each of its engines.
        kind: the use of the connection.
    """

    number: int
    kind: StreamKind


def greet(secret: bytes, version: str = __version__) -> Generator[Exchange, bytes, Caller]:
    """Speak the side that listens; return who called. The welcome comes later.

    Raises:
        StrangerError: it does not know the secret, or is of another release.
    """
    hello = yield Exchange(b"", HELLO.size)
    protocol, number, kind, release, _ = HELLO.unpack(hello)
    if protocol != PROTOCOL or kind not in list(StreamKind):
        raise StrangerError("it speaks another protocol")
    facts = _release(version) + os.urandom(NONCE_BYTES)
    said = hello + facts
    proof = yield Exchange(facts + _proof(secret, b"leader", said), PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"follower", said)):
        raise StrangerError("it does not know the secret")
    _check_release(release, version)
    return Caller(number, StreamKind(kind))


def call(
    secret: bytes, caller: Caller, version: str = __version__
) -> Generator[Exchange, bytes, None]:
    """Speak the caller's side.

    Raises:
        StrangerError: the other end does not know the secret, is of another release, or does not
            welcome this caller.
    """
    nonce = os.urandom(NONCE_BYTES)
    hello = HELLO.pack(PROTOCOL, caller.number, caller.kind, _release(version), nonce)
    answer = yield Exchange(hello, ANSWER_BYTES)
    said, proof = hello + answer[:-PROOF_BYTES], answer[-PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"leader", said)):
        raise StrangerError("it does not know the secret")
    release = answer[:VERSION_BYTES]
    is_same = release == _release(version)
    welcome = yield Exchange(_proof(secret, b"follower", said), len(WELCOME) if is_same else 0)
    _check_release(release, version)
    if welcome != WELCOME:
        raise StrangerError("it does not welcome this caller")


def _release(version: str) -> bytes:
    return version.encode()[:VERSION_BYTES].ljust(VERSION_BYTES, b"\0")


def _check_release(theirs: bytes, version: str) -> None:
    if theirs != _release(version):
        name = theirs.rstrip(b"\0").decode(errors="replace")
        raise StrangerError(f"it is of release {name}, and this end of {version}")


def _proof(secret: bytes, role: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, role + said, "sha256")
