"""The place of a server in its fleet: like the others, behind them, or different."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from mlx_parallm.replicas.peers import Peer


class Relation(Enum):
    """The state of another server, as seen from this one.

    Attributes:
        SAME: it had the same changes.
        BEHIND: it had some of them, and no others.
        AHEAD: it had the same, and more.
        FORKED: each had changes that the other lacks.
        UNKNOWN: it has not answered yet to what this server's state is now.
    """

    SAME = "same"
    BEHIND = "behind"
    AHEAD = "ahead"
    FORKED = "forked"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class View:
    """The state of another server that is reachable.

    Attributes:
        digest: of its changes.
        number: of the latest one.
        relation: to this server.
    """

    digest: str
    number: int
    relation: Relation


@dataclass(frozen=True, slots=True)
class Standing:
    """The place of a server in its fleet.

    Attributes:
        why: the reason for which it should get no requests; None if it should get some.
        target: the server to become like, because it had all changes of this one and more.
    """

    why: str | None = None
    target: Peer | None = None

    @property
    def is_ready(self) -> bool:
        """True if requests may come here."""
        return self.why is None


def standing(me: Peer, number: int, views: Mapping[Peer, View]) -> Standing:
    """Return this server's standing among those that it reaches."""
    ahead = {peer: view for peer, view in views.items() if view.relation is Relation.AHEAD}
    if ahead:
        target = largest(ahead)[0]
        ours, theirs = f"change {number}", f"change {views[target].number}"
        return Standing(f"This server is at {ours}, {target} at {theirs}: catching up.", target)
    forked = {peer: view for peer, view in views.items() if view.relation is Relation.FORKED}
    if not forked:
        return Standing()
    theirs = largest(forked)
    # Servers that are behind both count for neither: each half would count them as its own.
    ours = [me, *(peer for peer, view in views.items() if view.relation is Relation.SAME)]
    if (-len(ours), min(ours)) < (-len(theirs), min(theirs)):
        return Standing()
    return Standing(
        f"This server had other changes than {', '.join(map(str, theirs))}: it has no requests "
        "until `mlx_parallm fleet apply` has made them alike."
    )


def largest(views: Mapping[Peer, View]) -> Sequence[Peer]:
    """Return the largest group of servers with one state, sorted; of several, the lowest one's."""
    sizes = Counter(view.digest for view in views.values())
    first = {view.digest: peer for peer, view in sorted(views.items(), reverse=True)}
    digest = min(sizes, key=lambda each: (-sizes[each], first[each]))
    return sorted(peer for peer, view in views.items() if view.digest == digest)
