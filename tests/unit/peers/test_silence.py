"""A process that is silent for a whole timeout, by the checks that its listener makes."""

from __future__ import annotations

import threading

from mlx_parallm.peers.messages import Ready
from mlx_parallm.peers.silence import CHECKS, Pulse, Silence, watched


def checks(silence: Silence, count: int = CHECKS) -> list[bool]:
    return [silence.check() >= CHECKS for _ in range(count)]


def test_it_is_silent_once_nothing_came_for_a_timeout() -> None:
    silence = Silence()
    silence.begin()
    assert checks(silence) == [*[False] * (CHECKS - 1), True]


def test_a_message_begins_a_timeout_anew() -> None:
    silence = Silence()
    silence.begin()
    assert not any(checks(silence, CHECKS - 1))
    silence.end()
    silence.begin()
    # The first check finds the message.
    assert checks(silence, CHECKS + 1) == [*[False] * CHECKS, True]


def test_nobody_is_silent_to_whom_nobody_listens() -> None:
    silence = Silence()
    assert not any(checks(silence, 3 * CHECKS))
    silence.begin()
    silence.end()
    assert not any(checks(silence, 3 * CHECKS))


def test_a_silence_may_last_as_long_as_the_limit_says() -> None:
    silence, is_silent, limits = Silence(), threading.Event(), iter([3 * CHECKS] * CHECKS)
    silence.begin()
    # The process has begun to beat then.
    with watched(silence, 0.001, is_silent.set, lambda: next(limits, CHECKS)):
        is_silent.wait()
    assert silence.num_checks == CHECKS + 1


def test_the_first_message_of_a_process_never_ends_it() -> None:
    """Lower the limit while a check is made."""
    silence, is_silent, limits = Silence(), threading.Event(), [3 * CHECKS] * CHECKS
    silence.begin()
    is_asked_twice = threading.Event()

    def limit() -> int:
        if limits:
            return limits.pop()
        silence.end()
        is_asked_twice.set()
        return CHECKS

    with watched(silence, 0.001, is_silent.set, limit):
        is_asked_twice.wait()
    assert not is_silent.is_set()


def test_a_process_that_said_something_is_weak_no_longer() -> None:
    """Its limit was larger while it started, so it may have said nothing for longer."""
    pulse = Pulse(12, Ready)
    pulse.silence.begin()
    for _ in range(5):
        pulse.silence.check()
    pulse.silence.end()
    pulse.limit = CHECKS
    assert not pulse.is_weak
