"""How often a sequence may speculate, by what became of its proposals."""

from __future__ import annotations

# A sequence whose proposals keep being refused tries again after this many tokens.
LONGEST_PAUSE = 64


class Pace:
    """Doubles the pause after each draft that was refused whole; one that did well ends it."""

    def __init__(self) -> None:
        self._pause = 1
        self._resume_at = 0

    def allows(self, length: int) -> bool:
        """Return True if a sequence of ``length`` tokens may speculate now."""
        return length >= self._resume_at

    def record(self, length: int, num_proposed: int, num_accepted: int) -> None:
        """Take in a draft's fate; ``length`` counts the sequence's tokens after it."""
        if num_accepted == 0:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._resume_at = length + self._pause
        elif 2 * num_accepted >= num_proposed:
            self._pause = 1
