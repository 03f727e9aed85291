"""Bounds the work for one JSON schema."""

from __future__ import annotations

from mlx_parallm.types.errors import InvalidRequestError

# MAX_STEPS of rewriting a document, of about a microsecond each.
MAX_STEPS = 1_000_000


class TooMuchWorkError(InvalidRequestError):
    """The schema is too large to be rewritten."""


class Work:
    """Counts the steps for one document.

    Attributes:
        keyword: what is rewritten, for the refusal.
        num_steps: the steps so far.
    """

    def __init__(self) -> None:
        self.keyword = "size"
        self.num_steps = 0

    def spend(self, num_steps: int) -> None:
        """Count steps.

        Raises:
            TooMuchWorkError: there were more than MAX_STEPS.
        """
        self.num_steps += num_steps
        if self.num_steps > MAX_STEPS:
            raise TooMuchWorkError(
                f"The schema is too large: to enforce its {self.keyword} takes too much work."
            )
