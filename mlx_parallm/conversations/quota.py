"""The bytes of all that clients store, and each owner's share of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from mlx_parallm.fairness import SharedBudget
from mlx_parallm.storage.database import Connection, Database
from mlx_parallm.types.errors import RequestTooLargeError

T = TypeVar("T")


class StoredBytes:
    """Counts the stored bytes by owner. Belongs to one event loop."""

    def __init__(
        self, max_bytes: int, stored: Mapping[str, int], *, separates_owners: bool
    ) -> None:
        """Begin with what is stored.

        Args:
            max_bytes: most bytes of all owners together.
            stored: bytes by owner.
            separates_owners: True if an owner may have half at most.
        """
        self.max_bytes = max_bytes
        self._budget = SharedBudget(max_bytes)
        self._separates_owners = separates_owners
        for owner, num_bytes in stored.items():
            self.add(owner, num_bytes)

    @property
    def total(self) -> int:
        """The bytes of all owners together."""
        return self._budget.num_taken

    def has_room(self, owner: str, num_bytes: int) -> bool:
        """True if an owner may store so many bytes more."""
        return self._budget.has_room(num_bytes, self._client(owner))

    def claim(self, owner: str, num_bytes: int) -> None:
        """Count bytes that are about to be stored; raise RequestTooLargeError without room."""
        if not self.has_room(owner, num_bytes):
            raise RequestTooLargeError(
                f"All conversations and stored chats together may have {self.max_bytes} bytes "
                "(see --max-data-bytes), and those of one key half of it beside other keys; "
                "delete some."
            )
        self.add(owner, num_bytes)

    def add(self, owner: str, num_bytes: int) -> None:
        """Count bytes that are stored."""
        self._budget.take(num_bytes, self._client(owner))

    def release(self, owner: str, num_bytes: int) -> None:
        """Count bytes no more."""
        self._budget.release(num_bytes, self._client(owner))

    async def changed(
        self,
        database: Database,
        owner: str,
        work: Callable[[Connection], tuple[T, int]],
        growth: int = 0,
    ) -> T:
        """Run a transaction that returns a result, and by how many bytes there are more.

        ``growth`` is by how many there will be, which are claimed before.

        Raises:
            RequestTooLargeError: the owner has no room for them.
        """
        claimed = max(0, growth)
        self.claim(owner, claimed)
        try:
            result, grown = await database.run(work)
        except BaseException:
            self.release(owner, claimed)
            raise
        self.add(owner, grown - claimed)
        return result

    def _client(self, owner: str) -> str | None:
        return owner if self._separates_owners else None
