"""The changes of a server, as one that is to become like it reads them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, cast

from mlx_parallm.replicas.entries import GENESIS, Entry, Journal
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_list, is_object


@dataclass(frozen=True, slots=True)
class Past:
    """The state of a server, and the way to it.

    Attributes:
        number: of its latest change.
        digest: of all its changes.
        seen: the largest number that it has heard of, in changes and in labels.
        journal: what a fresh server needs to be like it.
        ancestors: digests of earlier states: a server in one of them is behind, not different.
    """

    number: int
    digest: str
    seen: int
    journal: Journal
    ancestors: Collection[str] = ()

    def knows(self, digest: str) -> bool:
        """True if this is an earlier state, or the state of a fresh server."""
        return digest in self.ancestors or (digest == GENESIS != self.digest)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON; see ``from_json``."""
        return {
            "number": self.number,
            "digest": self.digest,
            "seen": self.seen,
            "journal": [entry.to_json() for entry in self.journal],
            "ancestors": list(self.ancestors),
        }

    @staticmethod
    def from_json(value: Any) -> Past:
        """Return the past of a JSON value; raise InvalidRequestError if it is none."""
        if is_object(value):
            number, digest, seen = value.get("number"), value.get("digest"), value.get("seen")
            journal, ancestors = value.get("journal"), value.get("ancestors")
            if (
                isinstance(number, int)
                and isinstance(digest, str)
                and isinstance(seen, int)
                and is_list(journal)
                and is_list(ancestors)
                and all(isinstance(each, str) for each in ancestors)
            ):
                entries = tuple(map(Entry.from_json, journal))
                return Past(number, digest, seen, entries, cast("list[str]", ancestors))
        raise InvalidRequestError("This is no journal of a fleet.", param="journal")
