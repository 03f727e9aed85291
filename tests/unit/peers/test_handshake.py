"""Both ends of a connection prove that they know the secret before anything else is read."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mlx_parallm.peers.handshake import (
    ANSWER_BYTES,
    HELLO,
    NONCE_BYTES,
    PROOF_BYTES,
    PROTOCOL,
    VERSION_BYTES,
    WELCOME,
    Caller,
    StrangerError,
    StreamKind,
    call,
    greet,
)

SECRET = b"s" * 32
BEATS_OF_2 = Caller(2, StreamKind.BEATS)


def unchanged(data: bytes) -> bytes:
    return data


def shake(
    ours: bytes,
    theirs: bytes,
    *,
    change_hello: Callable[[bytes], bytes] = unchanged,
    change_proof: Callable[[bytes], bytes] = unchanged,
    welcome: bytes = WELCOME,
) -> Caller:
    """Return whom rank 0 has met, and end the follower's side too."""
    leader, follower = greet(ours), call(theirs, BEATS_OF_2)
    assert next(leader).size == HELLO.size
    hello = next(follower)
    answer = leader.send(change_hello(hello.send))
    assert hello.size == len(answer.send) == ANSWER_BYTES
    proof = follower.send(answer.send)
    assert len(proof.send) == answer.size
    try:
        leader.send(change_proof(proof.send))
    except StopIteration as met:
        with pytest.raises(StopIteration):
            follower.send(welcome)
        return met.value
    raise AssertionError("rank 0 asks for more")


def test_a_caller_that_knows_the_secret_is_met() -> None:
    assert shake(SECRET, SECRET) == BEATS_OF_2


def test_a_caller_finds_out_that_rank_0_does_not_know_the_secret() -> None:
    with pytest.raises(StrangerError, match="does not know the secret"):
        shake(b"t" * 32, SECRET)


def test_a_wrong_proof_is_refused() -> None:
    with pytest.raises(StrangerError, match="does not know the secret"):
        shake(SECRET, SECRET, change_proof=lambda proof: proof[::-1])


def test_rank_0s_proof_does_not_pass_for_a_followers() -> None:
    leader = greet(SECRET)
    next(leader)
    answer = leader.send(next(call(SECRET, BEATS_OF_2)).send)
    with pytest.raises(StrangerError, match="does not know the secret"):
        leader.send(answer.send[-PROOF_BYTES:])


def test_a_proof_holds_for_one_rank_and_one_stream_only() -> None:
    def claims_rank_3(hello: bytes) -> bytes:
        protocol, _, *rest = HELLO.unpack(hello)
        return HELLO.pack(protocol, 3, *rest)

    with pytest.raises(StrangerError, match="does not know the secret"):
        shake(SECRET, SECRET, change_hello=claims_rank_3)


def test_a_proof_cannot_be_used_again() -> None:
    follower = call(SECRET, BEATS_OF_2)
    hello = next(follower).send
    first, second = greet(SECRET), greet(SECRET)
    next(first)
    next(second)
    proof = follower.send(first.send(hello).send).send
    second.send(hello)
    with pytest.raises(StrangerError, match="does not know the secret"):
        second.send(proof)


@pytest.mark.parametrize(
    "hello",
    [
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1:5000\r\n" * 3)[: HELLO.size],
        HELLO.pack(b"parallm0", 2, 1, bytes(VERSION_BYTES), bytes(NONCE_BYTES)),
        HELLO.pack(PROTOCOL, 2, 9, bytes(VERSION_BYTES), bytes(NONCE_BYTES)),
    ],
    ids=["http", "protocol", "stream"],
)
def test_other_protocols_are_refused(hello: bytes) -> None:
    leader = greet(SECRET)
    next(leader)
    with pytest.raises(StrangerError, match="another protocol"):
        leader.send(hello)


def test_a_follower_needs_to_be_welcomed() -> None:
    with pytest.raises(StrangerError, match="does not welcome"):
        shake(SECRET, SECRET, welcome=b"X")


def test_both_ends_name_another_release_once_they_have_proven_the_secret() -> None:
    server, engine = call(SECRET, BEATS_OF_2, "0.2.0"), greet(SECRET, "0.1.0")
    next(engine)
    proof = server.send(engine.send(next(server).send).send)
    with pytest.raises(StrangerError, match=r"it is of release 0\.2\.0, and this end of 0\.1\.0"):
        engine.send(proof.send)
    # It is not welcomed, so nothing is read.
    assert proof.size == 0
    with pytest.raises(StrangerError, match=r"it is of release 0\.1\.0, and this end of 0\.2\.0"):
        server.send(b"")


def test_a_stranger_of_another_release_is_only_a_stranger() -> None:
    engine = greet(SECRET, "0.1.0")
    next(engine)
    proof = engine.send(next(call(SECRET, BEATS_OF_2, "0.2.0")).send)
    with pytest.raises(StrangerError, match="does not know the secret"):
        engine.send(bytes(proof.size))
