"""The proof that both ends of a new connection know the secret that rank 0 broadcast.

Nothing is unpickled before it. A follower says who it is and sends a nonce; rank 0 answers with a
nonce of its own and a proof; the follower answers with its proof; rank 0 welcomes it. A proof is an
HMAC-SHA-256 over everything that was said before, so that it fits no other connection, rank or
role.

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

SECRET_BYTES = NONCE_BYTES = PROOF_BYTES = 32
# HELLO: the protocol, the rank, the stream, and a nonce.
HELLO = struct.Struct(f"<8sIB{NONCE_BYTES}s")
PROTOCOL = b"parallm1"
WELCOME = b"W"


class StreamKind(IntEnum):
    """The use of a connection between rank 0 and a follower."""

    #: Ops and replies.
    LOG = 0
    #: Beats.
    BEATS = 1


class StrangerError(Exception):
    """The other end is none of ours, or does not know the secret."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Bytes to send, and how many to read then."""

    send: bytes
    size: int


@dataclass(frozen=True, slots=True)
class Caller:
    """A connection that a follower has proven to be its own."""

    rank: int
    kind: StreamKind


def greet(secret: bytes) -> Generator[Exchange, bytes, Caller]:
    """Speak rank 0's side; return who called, or raise StrangerError. The welcome comes later."""
    hello = yield Exchange(b"", HELLO.size)
    protocol, rank, kind, _ = HELLO.unpack(hello)
    if protocol != PROTOCOL or kind not in list(StreamKind):
        raise StrangerError("it speaks another protocol")
    said = hello + os.urandom(NONCE_BYTES)
    nonce = said[HELLO.size :]
    proof = yield Exchange(nonce + _proof(secret, b"leader", said), PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"follower", said)):
        raise StrangerError("it does not know the secret")
    return Caller(rank, StreamKind(kind))


def call(secret: bytes, caller: Caller) -> Generator[Exchange, bytes, None]:
    """Speak a follower's side; raise StrangerError if the other end is not rank 0."""
    hello = HELLO.pack(PROTOCOL, caller.rank, caller.kind, os.urandom(NONCE_BYTES))
    answer = yield Exchange(hello, NONCE_BYTES + PROOF_BYTES)
    said, proof = hello + answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"leader", said)):
        raise StrangerError("it does not know the secret")
    welcome = yield Exchange(_proof(secret, b"follower", said), len(WELCOME))
    if welcome != WELCOME:
        raise StrangerError("it does not welcome this rank")


def _proof(secret: bytes, role: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, role + said, "sha256")
