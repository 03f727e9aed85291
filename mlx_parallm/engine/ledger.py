"""Counts the memory of a device that is promised to models.

What is promised decides what fits, never what an allocator says at the moment: loads that begin at
the same time would all see the same free bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mlx_parallm.engine.kind import MemoryLimit

#: Parts of a model's memory: its parameters, its KV pool with the states after prefixes, and the
#: tensors of its adapters.
WEIGHTS, KV, ADAPTERS = "weights", "kv", "adapters"

#: True for the claims that a limit counts.
Counts = Callable[["Claim"], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Bytes that are promised to a model.

    Attributes:
        model: its first name.
        kind: the name of its kind.
        what: the part of its memory.
        num_bytes: of each device that has the model.
    """

    model: str
    kind: str
    what: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Lack:
    """Bytes that are missing for a claim: of the whole memory, and of what its kind may take."""

    total: int = 0
    of_kind: int = 0

    def __bool__(self) -> bool:
        """Return True if anything is missing."""
        return self.total > 0 or self.of_kind > 0

    def without(self, claims: Iterable[Claim], claim: Claim) -> Lack:
        """Return what is missing for ``claim`` once others' claims are gone."""
        total, of_kind = self.total, self.of_kind
        for other in claims:
            total -= other.num_bytes
            of_kind -= other.num_bytes if _share_limit(other, claim) else 0
        return Lack(max(0, total), max(0, of_kind))


class Ledger:
    """The claims on a device, which never exceed its limit. It belongs to the event loop.

    With several engines, each has the same models on a device of its own, or on a part of one.

    Attributes:
        limit: most bytes of all claims; None if it is not known.
        limits: of the weights of kinds, by their names.
    """

    def __init__(self, limits: Mapping[str, MemoryLimit], limit: int | None = None) -> None:
        """Begin without claims."""
        self.limit = limit
        self.limits = limits
        self._claims: dict[tuple[str, str], Claim] = {}

    def restart(self, claims: Sequence[Claim], limit: int | None) -> None:
        """Note that these are all claims, which were granted when the models were loaded."""
        self._claims = {(claim.model, claim.what): claim for claim in claims}
        self.limit = None if limit is None else max(limit, self.promised)

    @property
    def promised(self) -> int:
        """Return the bytes of all claims."""
        return sum(claim.num_bytes for claim in self._claims.values())

    def claims(self, model: str | None = None) -> list[Claim]:
        """Return the claims of a model, or all."""
        return [each for each in self._claims.values() if model in (None, each.model)]

    def num_bytes(self, model: str, what: str) -> int:
        """Return the bytes that a part of a model is promised; 0 for none."""
        claim = self._claims.get((model, what))
        return 0 if claim is None else claim.num_bytes

    def room(self, claim: Claim) -> int | None:
        """Return the bytes that a claim may have at most beside the others; None for any."""
        rooms = [
            limit - sum(other.num_bytes for other in self._others(claim) if counts(other))
            for limit, counts in self._bounds(claim)
        ]
        return max(0, min(rooms)) if rooms else None

    def lack(self, claim: Claim) -> Lack:
        """Return what is missing for a claim."""
        missing = [
            claim.num_bytes
            + sum(each.num_bytes for each in self._others(claim) if counts(each))
            - limit
            for limit, counts in self._bounds(claim)
        ]
        total = missing.pop(0) if self.limit is not None else 0
        return Lack(max(0, total), max(0, *missing, 0))

    def promise(self, claim: Claim) -> None:
        """Take the bytes of a claim, in place of an earlier one of the same part of a model.

        There must be room for it.
        """
        assert not self.lack(claim), f"there is no room for {claim}"
        self._claims[claim.model, claim.what] = claim

    def release(self, model: str, what: str | None = None) -> None:
        """Forget the claims of a model, or one; there may be none."""
        for key in [key for key in self._claims if key[0] == model and what in (None, key[1])]:
            del self._claims[key]

    def _others(self, claim: Claim) -> list[Claim]:
        key = (claim.model, claim.what)
        return [other for place, other in self._claims.items() if place != key]

    def _bounds(self, claim: Claim) -> Iterable[tuple[int, Counts]]:
        if self.limit is not None:
            yield self.limit, lambda _: True
        own = self.limits.get(claim.kind)
        if own is not None and claim.what == WEIGHTS:
            yield own.num_bytes, lambda other: _share_limit(other, claim)


def _share_limit(claim: Claim, other: Claim) -> bool:
    """True if both are weights of one kind, which a limit of the kind bounds together."""
    return claim.what == other.what == WEIGHTS and claim.kind == other.kind
