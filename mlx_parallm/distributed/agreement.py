"""Rank 0 compares facts about all ranks, and refuses ranks that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from mlx_parallm.types.errors import ConfigError, RankLostError

#: ``FACTS``, ``VERDICT``: the kinds of the messages of rank 0.
FACTS, VERDICT = 100, 101
# HEARD_S: seconds that rank 0 waits until the others have heard that a rank is refused.
HEARD_S = 5.0

Facts = Mapping[str, str]


class AskingLink(Protocol):
    """The part of ``LeaderLink`` that is needed."""

    def send(self, kind: int, payload: Any) -> int:
        """Send a message to all followers; return its number."""
        ...

    def replies(self, number: int, timeout_s: float | None = None) -> list[Any]:
        """Return the replies of all followers, by rank."""
        ...


class AnsweringLink(Protocol):
    """The part of ``FollowerLink`` that is needed."""

    def receive(self) -> Any:
        """Return the next message of rank 0; None after its goodbye."""
        ...

    def reply(self, number: int, value: Any) -> None:
        """Answer a message."""
        ...


def agree(link: AskingLink, facts: Facts, timeout_s: float, on_refusal: Callable[[], None]) -> None:
    """Compare this rank's facts with those of the followers, which call ``answer``.

    Args:
        link: leads to the followers.
        facts: this rank's.
        timeout_s: most seconds to wait for those of the others.
        on_refusal: called before the others hear that a rank is refused. All ranks end then, and
            one that ends is not lost.

    Raises:
        ConfigError: a rank differs; followers raise the same error.
        RankLostError: a rank has not answered within ``timeout_s``.
    """
    others = link.replies(link.send(FACTS, None), timeout_s)
    problem = difference(facts, others)
    if problem is None:
        link.send(VERDICT, None)
        return
    on_refusal()
    with suppress(RankLostError):
        # A rank that has not heard it would take the end of this one for a loss.
        link.replies(link.send(VERDICT, problem), HEARD_S)
    raise ConfigError(problem)


def answer(link: AnsweringLink, facts: Facts, on_refusal: Callable[[], None]) -> None:
    """Let rank 0 compare this rank's facts with its own; see ``agree``.

    Raises:
        ConfigError: a rank differs.
        RankLostError: rank 0 ended before it said so.
    """
    message = link.receive()
    if message is None:
        raise RankLostError(0, "ended before it served")
    link.reply(message.number, dict(facts))
    verdict = link.receive()
    if verdict is None:
        raise RankLostError(0, "ended before it served")
    if verdict.payload is None:
        return
    on_refusal()
    with suppress(RankLostError):
        link.reply(verdict.number, None)
    raise ConfigError(verdict.payload)


def difference(facts: Facts, others: Sequence[Facts]) -> str | None:
    """Return what the first rank that differs from rank 0 has otherwise; None if none does."""
    for rank, other in enumerate(others, 1):
        names = [name for name in {**facts, **other} if facts.get(name) != other.get(name)]
        if names:
            parts = [
                f"{name} is {_shown(other, name)}, not {_shown(facts, name)}" for name in names
            ]
            return f"Rank {rank} differs from rank 0: {'; '.join(parts)}."
    return None


def _shown(facts: Facts, name: str) -> str:
    return facts[name][:80] if name in facts else "absent"
