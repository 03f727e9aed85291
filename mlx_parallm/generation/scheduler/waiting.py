"""Sequences that wait to run: by priority, in turn between clients, then short prompts first."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from operator import attrgetter

from mlx_parallm.generation.scheduler.sequence import Sequence
from mlx_parallm.types.model_input import num_source_tokens
from mlx_parallm.types.request import PolicyWeights

# AGING_PERIOD: once in so many admissions the longest waiting sequence goes first, whatever its
# priority, so that nothing starves behind an endless stream of better sequences.
AGING_PERIOD = 16
# PATIENCE: shorter prompts go before one while less than so many times its tokens are admitted.
PATIENCE = 8
# LONG_PROMPT: longer prompts count as having so many tokens. A long prompt is often cached for the
# most part, and must not wait for all short ones that come while its own tokens could be computed.
LONG_PROMPT = 512


class ClientLine:
    """A client's sequences of one priority, in order.

    A sequence's place is the number of prompt tokens that were admitted before it came, and
    ``PATIENCE`` times its own. So of prompts that come together the shortest goes first, and a
    prompt is passed only by shorter ones that come before so many tokens were admitted.

    Several sequences come first: one of each adapter. While an adapter has no slot, those behind
    that need another may go, and so may those behind one that waits for something to arrive.
    """

    def __init__(self) -> None:
        # Each is sorted by place.
        self._parts: dict[PolicyWeights, list[Sequence]] = {}
        self._front = self._num_admitted = 0

    def __bool__(self) -> bool:
        return bool(self._parts)

    def __iter__(self) -> Iterator[Sequence]:
        for part in self._parts.values():
            yield from part

    def append(self, sequence: Sequence) -> None:
        """Add a new sequence."""
        sequence.place = self._num_admitted + PATIENCE * _num_counted(sequence)
        part = self._parts.setdefault(sequence.group.weights, [])
        insort(part, sequence, key=attrgetter("place"))

    def push_front(self, sequence: Sequence) -> None:
        """Add before all others."""
        self._front -= 1
        sequence.place = self._front
        self._parts.setdefault(sequence.group.weights, []).insert(0, sequence)

    def admit(self, sequence: Sequence) -> None:
        """Count the tokens of a sequence that is removed because it runs."""
        self._num_admitted += _num_counted(sequence)

    def remove(self, sequence: Sequence, successor: Sequence | None = None) -> bool:
        """Remove a sequence, or replace it by another of its request; False if it is not here."""
        part = self._parts.get(sequence.group.weights)
        if part is None or sequence not in part:
            return False
        if successor is not None:
            successor.place = sequence.place
            part[part.index(sequence)] = successor
            return True
        part.remove(sequence)
        if not part:
            del self._parts[sequence.group.weights]
        return True

    def heads(self) -> list[Sequence]:
        """Return the first sequence of each adapter that waits for nothing to arrive, in order."""
        first = (next((s for s in part if not s.is_blocked), None) for part in self._parts.values())
        return sorted((s for s in first if s is not None), key=attrgetter("place"))

    def oldest(self) -> list[Sequence]:
        """Return the sequence of each adapter that came first, and waits for nothing to arrive."""
        ready = ([s for s in part if not s.is_blocked] for part in self._parts.values())
        return [min(part, key=_arrival) for part in ready if part]


def _num_counted(sequence: Sequence) -> int:
    """Return the number of tokens that a sequence counts for: of its prompt and its source."""
    request = sequence.request
    return min(len(request.prompt_ids) + num_source_tokens(request.inputs), LONG_PROMPT)


def _arrival(sequence: Sequence) -> tuple[int, int]:
    return sequence.group.arrival, sequence.index


class WaitingQueue:
    """Hands out the sequence that should run next.

    Attributes:
        num_tokens: tokens of the prompts of the sequences in it.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        # By priority, then by client: whose turn it is comes first.
        self._lines: dict[int, OrderedDict[str, ClientLine]] = {}
        self._num_admitted = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        for line in self._all_lines():
            yield from line

    def _all_lines(self) -> Iterator[ClientLine]:
        for clients in self._lines.values():
            yield from clients.values()

    @property
    def clients(self) -> set[str]:
        """Return the clients with waiting sequences."""
        return {client for clients in self._lines.values() for client in clients}

    def append(self, sequence: Sequence) -> None:
        """Add a new sequence to the client's others of this priority."""
        self._line(sequence).append(sequence)
        self._count(sequence, 1)

    def push_front(self, sequence: Sequence) -> None:
        """Add before the client's other sequences, and let the client go first: it was running."""
        self.put_back(sequence)
        self._lines[sequence.request.priority].move_to_end(sequence.request.client, last=False)

    def put_back(self, sequence: Sequence) -> None:
        """Add before the client's other sequences; it had its turn."""
        self._line(sequence).push_front(sequence)
        self._count(sequence, 1)

    def remove(self, sequence: Sequence, successor: Sequence | None = None) -> bool:
        """Remove a sequence, or replace it by another; return False if it does not wait."""
        clients = self._lines.get(sequence.request.priority, OrderedDict())
        line = clients.get(sequence.request.client)
        if line is None or not line.remove(sequence, successor):
            return False
        if successor is None:
            self._drop_if_empty(sequence)
        return True

    def peek(
        self,
        may_run: Callable[[Sequence], bool],
        is_owed: Callable[[Sequence], bool] = lambda sequence: True,
    ) -> Sequence | None:
        """Return the next sequence that may run; None if there is none.

        Those that are owed a place go before all others.
        """
        if self._num_admitted % AGING_PERIOD == AGING_PERIOD - 1:
            oldest = (each for line in self._all_lines() for each in line.oldest())
            return min(filter(may_run, oldest), key=_arrival, default=None)
        first = None
        for sequence in filter(may_run, self.heads()):
            if is_owed(sequence):
                return sequence
            first = first or sequence
        return first

    def admit(self, sequence: Sequence) -> None:
        """Remove the sequence that ``peek`` returned; the next client has its turn."""
        self._line(sequence).admit(sequence)
        self.remove(sequence)
        self._num_admitted += 1
        clients = self._lines.get(sequence.request.priority)
        if clients is not None and sequence.request.client in clients:
            clients.move_to_end(sequence.request.client)

    def heads(self) -> Iterator[Sequence]:
        """Yield the heads of every line, by priority and then by turn."""
        for priority in sorted(self._lines):
            for line in self._lines[priority].values():
                yield from line.heads()

    def _line(self, sequence: Sequence) -> ClientLine:
        clients = self._lines.setdefault(sequence.request.priority, OrderedDict())
        return clients.setdefault(sequence.request.client, ClientLine())

    def _count(self, sequence: Sequence, change: int) -> None:
        """Count a sequence that was added, by 1, or removed, by -1."""
        self._length += change
        self.num_tokens += change * len(sequence.request.prompt_ids)

    def _drop_if_empty(self, sequence: Sequence) -> None:
        self._count(sequence, -1)
        priority, client = sequence.request.priority, sequence.request.client
        if not self._lines[priority][client]:
            del self._lines[priority][client]
        if not self._lines[priority]:
            del self._lines[priority]
