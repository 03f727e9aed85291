"""Sequences that run: each holds a slot and blocks. Clients with work share the slots evenly."""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import count

from mlx_parallm.config import SchedulerConfig
from mlx_parallm.engine.adapter_slots import NO_ADAPTER, AdapterSlots
from mlx_parallm.generation.inputs.cache import InputCache
from mlx_parallm.generation.inputs.held import HeldInputs
from mlx_parallm.generation.inputs.runs import InputRuns
from mlx_parallm.generation.kv_cache.blocks import BlockTable
from mlx_parallm.generation.kv_cache.fetches import ChainFetch
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.scheduler.sequence import RequestGroup, Sequence
from mlx_parallm.generation.scheduler.sources import SourceCache
from mlx_parallm.generation.scheduler.waiting import WaitingQueue
from mlx_parallm.types.errors import InvalidRequestError, OverloadedError
from mlx_parallm.types.request import GenerateRequest, PolicyWeights
from mlx_parallm.types.step import Moves


class LiveRequests:
    """Requests by id, their samples that have not ended by ``seq_id``, and how many a client has.

    ``max_waiting`` is the most samples that wait; 0 for any number.

    Attributes:
        groups: the requests by their ids.
        by_id: their samples that have not ended.
    """

    def __init__(self, running: RunningSet, max_waiting: int) -> None:
        self._running = running
        self._max_waiting = max_waiting
        self.groups: dict[str, RequestGroup] = {}
        self.by_id: dict[int, Sequence] = {}
        self._per_client: Counter[str] = Counter()
        self._seq_ids = count()
        self._arrivals = count()

    @property
    def num_waiting(self) -> int:
        """Return how many live sequences do not run, future forks of a leader included."""
        return len(self.by_id) - self._running.num_taken

    def add(
        self, request: GenerateRequest, end_ids: frozenset[int], weights: PolicyWeights, seed: int
    ) -> RequestGroup:
        """Add a request and return its group; sample i uses ``seed + i``.

        Raises:
            OverloadedError: too many sequences wait.
            InvalidRequestError: the request's id is in use.
        """
        num_sequences = request.params.num_sequences
        self.check_room(request.client, num_sequences)
        if request.request_id in self.groups:
            raise InvalidRequestError("The request id is in use.", param="request_id")
        group = RequestGroup(request, end_ids, next(self._arrivals), weights)
        prompt_ids = list(request.prompt_ids)
        for index in range(num_sequences):
            sequence = Sequence(next(self._seq_ids), group, index, seed + index, prompt_ids)
            group.sequences[index] = sequence
            self.by_id[sequence.seq_id] = sequence
        self.groups[request.request_id] = group
        self._per_client[request.client] += num_sequences
        return group

    def forget(self, sequence: Sequence) -> None:
        """Stop counting a sample that neither runs nor waits."""
        del self.by_id[sequence.seq_id]
        client = sequence.request.client
        self._per_client[client] -= 1
        if not self._per_client[client]:
            del self._per_client[client]
        group = sequence.group
        del group.sequences[sequence.index]
        if not group.sequences:
            del self.groups[group.request.request_id]

    def check_room(self, client: str, n: int) -> None:
        """See ``Scheduler.check_room``."""
        limit = self._max_waiting
        if not limit or self.num_waiting + n <= limit:
            return
        # Copy at once: the engine thread may add to the counts meanwhile.
        live = dict(self._per_client)
        waiting = {name: num - self._running.count_of(name) for name, num in live.items()}
        own = waiting.pop(client, 0)
        num_clients = 1 + sum(num > 0 for num in waiting.values())
        if num_clients == 1 or own + n > limit // num_clients:
            raise OverloadedError(f"{self.num_waiting} sequences are waiting already.")

    def check_integrity(self) -> None:
        """Assert that every sample is counted."""
        assert self._per_client == Counter(
            sequence.request.client for sequence in self.by_id.values()
        )


# INPUT_CACHE_BYTES bounds the products of inputs on the device; a single larger one is kept alone.
INPUT_CACHE_BYTES = 256 << 20
# DEFAULT_PRIORITY: only sequences of this priority or a better one are owed a share. A better
# priority does not keep other clients from their shares.
DEFAULT_PRIORITY = 0


class RunningSet:
    """The running sequences, best first; hands out the lowest free slot.

    Attributes:
        adapters: the slots of their adapters.
        inputs: keeps the rows and features of inputs.
        sources: keeps the KV of sources; None for a model without an encoder.
        input_runs: computes what either of them keeps.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        *,
        num_tower_stages: int = 1,
        has_sources: bool = False,
    ) -> None:
        self._config = config
        self.adapters = AdapterSlots(config.max_loras)
        self.inputs = InputCache(INPUT_CACHE_BYTES)
        self.sources = SourceCache(kv, self.adapters) if has_sources else None
        self.input_runs = InputRuns(self.sources or self.inputs, num_tower_stages)
        self._kv = kv
        self._sequences: list[Sequence] = []
        self._free_slots = list(range(config.max_num_seqs))
        self._per_client: Counter[str] = Counter()
        # Slots that are kept free for further beams of the requests that run.
        self._kept_slots: dict[RequestGroup, int] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def worst(self) -> Sequence:
        """Return the sequence to preempt first: the largest priority number, then the youngest."""
        return self._sequences[-1]

    @property
    def num_slots(self) -> int:
        """Return the most sequences that may run."""
        return self._config.max_num_seqs

    @property
    def num_free_slots(self) -> int:
        """Return how many more sequences may run."""
        return len(self._free_slots) - sum(self._kept_slots.values())

    @property
    def num_taken(self) -> int:
        """Return how many slots are held, or kept free for beams."""
        return self.num_slots - self.num_free_slots

    def num_needed(self, sequence: Sequence) -> int:
        """Return how many free slots a sequence needs to start: one for each beam."""
        beams = sequence.request.params.beams
        if beams is None:
            return 1
        return 0 if sequence.group in self._kept_slots else beams.width

    @property
    def clients(self) -> Collection[str]:
        """Return the clients with running sequences."""
        return self._per_client.keys()

    def count_spare(self) -> int:
        """Return the number of free blocks that running prompts do not still need."""
        # It is asked for each sequence that starts, and most of those that run need nothing.
        size, num_missing = self._kv.block_size, 0
        for sequence in self._sequences:
            num_tokens = len(sequence.token_ids) - size * len(sequence.blocks.blocks)
            if num_tokens > 0:
                num_missing += self._kv.blocks_for(num_tokens)
        return self._kv.num_free - num_missing

    def count_of(self, client: str) -> int:
        """Return how many sequences of a client run."""
        return self._per_client.get(client, 0)

    def allows_client(self, sequence: Sequence) -> bool:
        """Return True if the sequence's client may run one more, or all beams of one."""
        limit = self._config.max_num_seqs_per_client
        if limit is None:
            return True
        return self._per_client[sequence.request.client] + self.num_needed(sequence) <= limit

    def may_start(self, sequence: Sequence) -> bool:
        """Return True if its client may run one more and its adapter has or can get a slot."""
        if not self.allows_client(sequence):
            return False
        adapter = sequence.group.adapter
        return adapter is None or self.adapters.has_room(adapter)

    def hold_source(self, sequence: Sequence, room: int) -> bool:
        """Let a sequence hold its source, if it has one, before it starts.

        False if that needs more than ``room`` blocks.
        """
        group = sequence.group
        if self.sources is None or group.source is None:
            return True
        read = sequence.source_read
        sequence.held = self.sources.hold(group.source_key, group.source, room, read)
        if sequence.held is None:
            return False
        self._leave_read(sequence)
        return True

    def take_moves(self, step_id: int) -> Moves:
        """Return what a step computes of inputs before it runs; see ``InputRuns.take_moves``."""
        if self.sources is not None:
            self.sources.begin_step(step_id)
        return self.input_runs.take_moves()

    def end_moves(self, step_id: int, *, has_failed: bool = False) -> None:
        """Note that what a step computed of inputs is there, or is not."""
        if self.sources is not None:
            self.sources.end_step(step_id, has_failed=has_failed)

    def await_source(self, sequence: Sequence) -> bool:
        """Begin to read the source of a sequence if only stores have it; True if it is awaited."""
        group, read = sequence.group, sequence.source_read
        if self.sources is None or group.source is None:
            return False
        key = group.source_key
        if read is not None and (read.is_taken or read.key != key):
            # Another sequence had it, or the weights have changed.
            self._leave_read(sequence)
        if sequence.source_read is None:
            sequence.source_read = self.sources.read(key, group.source)
        read = sequence.source_read
        if read is None:
            return False
        if read not in sequence.arrivals:
            sequence.arrivals.append(read)
        return read.is_awaited(0)

    def source_fetches(self) -> list[ChainFetch]:
        """Return the chains of sources that are read, or not filled yet."""
        return [] if self.sources is None else self.sources.fetches()

    def forget_inputs(self) -> None:
        """Let no later sequence find what is computed of inputs now."""
        self.inputs.clear()
        if self.sources is not None:
            self.sources.clear()

    def leave_inputs(self, sequence: Sequence) -> None:
        """Release what a sequence holds of its inputs."""
        if sequence.held is not None:
            sequence.held.release()
            sequence.held = None

    def start(self, sequence: Sequence, table: BlockTable, num_computed: int) -> None:
        """Start a sequence: give it a slot, and blocks that hold ``num_computed`` tokens.

        It must hold its source already.
        """
        self._take_slots(sequence)
        sequence.table = table
        sequence.num_computed = sequence.num_kept = num_computed
        sequence.tail = None
        sequence.num_drafted = self._kv.count_drafted(table)
        sequence.slot = heapq.heappop(self._free_slots)
        sequence.blocked_at = 0
        sequence.is_caught_up = False
        sequence.content = sequence.group.weights.content
        has_adapter = self.take_adapter(sequence)
        assert has_adapter, "a sequence was started that may not"
        insort(self._sequences, sequence, key=lambda sequence: sequence.order)
        # It waits for nothing more that it needed to start.
        sequence.arrivals.clear()
        group = sequence.group
        if group.inputs and sequence.held is None:
            sequence.held = HeldInputs(self.inputs, group.inputs, group.salt)
        if sequence.held is not None:
            sequence.arrivals.append(sequence.held)

    def _take_slots(self, sequence: Sequence) -> None:
        """Count the slots that a sequence takes: the first beam takes those of all."""
        count = self.num_needed(sequence)
        self._per_client[sequence.request.client] += count
        if sequence.request.params.beams is not None:
            kept = self._kept_slots.get(sequence.group, count)
            self._kept_slots[sequence.group] = kept - 1

    def _give_slots(self, sequence: Sequence) -> None:
        """Count the slots that a sequence gives back: the last beam gives back those of all."""
        count, beams, group = 1, sequence.request.params.beams, sequence.group
        if beams is not None:
            self._kept_slots[group] += 1
            if self._kept_slots[group] < beams.width:
                return
            count = self._kept_slots.pop(group)
        client = sequence.request.client
        self._per_client[client] -= count
        if not self._per_client[client]:
            del self._per_client[client]

    def stop(self, sequence: Sequence) -> None:
        """Stop a sequence: free its slot and blocks; full blocks stay in the prefix cache."""
        assert sequence.slot is not None, "only a running sequence can stop"
        self._kv.free(sequence.blocks)
        heapq.heappush(self._free_slots, sequence.slot)
        self._sequences.remove(sequence)
        self._give_slots(sequence)
        sequence.table, sequence.slot, sequence.num_computed = None, None, 0
        sequence.restored_from, sequence.replay_end = None, 0
        if sequence.held is not None:
            sequence.arrivals.remove(sequence.held)
            self.leave_inputs(sequence)
        self.end_fetch(sequence)
        self.leave_adapter(sequence)

    def end_fetch(self, sequence: Sequence) -> None:
        """Release the chains that were read for a sequence, and what is not filled of its own."""
        self._leave_read(sequence)
        if sequence.fetch is not None:
            assert self._kv.tiers is not None, "only stores are read"
            self._kv.tiers.fetches.release(sequence.fetch)
            if sequence.fetch in sequence.arrivals:
                sequence.arrivals.remove(sequence.fetch)
            sequence.fetch = None
            sequence.arrived.clear()

    def _leave_read(self, sequence: Sequence) -> None:
        """Let a sequence not wait any more for its source to be read."""
        read, sequence.source_read = sequence.source_read, None
        if read is not None:
            assert self.sources is not None, "only sources are read"
            self.sources.leave_read(read)

    def take_adapter(self, sequence: Sequence) -> bool:
        """Acquire the slot of a sequence's adapter; return False if none is free."""
        adapter = sequence.group.adapter
        if adapter is None:
            return True
        if not self.adapters.is_available(adapter):
            return False
        sequence.adapter, sequence.adapter_slot = adapter, self.adapters.acquire(adapter)
        return True

    def leave_adapter(self, sequence: Sequence) -> None:
        """Release the slot of a sequence's adapter."""
        if sequence.adapter is not None:
            self.adapters.release(sequence.adapter)
        sequence.adapter, sequence.adapter_slot = None, NO_ADAPTER

    def check_integrity(self) -> None:
        """Assert that every block and every slot is accounted for, exactly once."""
        sources = () if self.sources is None else self.sources.tables()
        self._kv.check_integrity([*(each.blocks for each in self._sequences), *sources])
        slots = [sequence.slot for sequence in self._sequences if sequence.slot is not None]
        assert sorted(slots + self._free_slots) == list(range(self._config.max_num_seqs))
        adapters = Counter(
            sequence.adapter for sequence in self._sequences if sequence.adapter is not None
        )
        self.adapters.check_integrity(adapters)
        clients = Counter(sequence.request.client for sequence in self._sequences)
        for group, num_kept in self._kept_slots.items():
            beams = group.request.params.beams
            running = [each for each in self._sequences if each.group is group]
            assert beams is not None, "slots are kept for samples"
            assert 0 < len(running) == beams.width - num_kept, "slots of beams are lost"
            clients[group.request.client] += num_kept
        assert clients == self._per_client
        held = [sequence.held for sequence in self._sequences if sequence.held is not None]
        num_held = sum(each.num_held for each in held)
        if self.sources is None:
            self.inputs.check_integrity(num_held)
        else:
            self.sources.check_integrity(num_held)
        self.input_runs.check_integrity()
        assert sorted(self._sequences, key=lambda sequence: sequence.order) == self._sequences


class ClientShares:
    """The slots that each client may hold while others wait: an even share of all slots.

    A client may have more while no client with less than its share waits.

    Attributes:
        owed: since ``look``: of each client that has less than its share, what waits first.
    """

    def __init__(self, waiting: WaitingQueue, running: RunningSet) -> None:
        self._waiting = waiting
        self._running = running
        self._share = running.num_slots
        self.owed: list[Sequence] = []

    def look(self) -> None:
        """Note which clients have work; called before a step is planned."""
        self.owed = []
        if not len(self._waiting):
            return
        num_clients = len(self._waiting.clients.union(self._running.clients))
        self._share = max(1, self._running.num_slots // num_clients)
        if num_clients > 1:
            heads = [sequence for sequence in self._waiting.heads() if self.is_owed(sequence)]
            first: dict[str, Sequence] = {}
            for sequence in filter(self._running.may_start, heads):
                first.setdefault(sequence.request.client, sequence)
            self.owed = list(first.values())

    def is_owed(self, sequence: Sequence) -> bool:
        """Return True if a waiting sequence's client has less than its share."""
        is_usual = sequence.request.priority <= DEFAULT_PRIORITY
        return is_usual and self._running.count_of(sequence.request.client) < self._share

    def overdrawn(self) -> list[Sequence]:
        """Return running sequences beyond their clients' shares, the worst first.

        Beams run together or not at all, so their first one decides.
        """
        counted = Counter[str]()
        firsts: dict[RequestGroup, int] = {}
        beyond: list[Sequence] = []
        for sequence in self._running:
            counted[sequence.request.client] += 1
            number = counted[sequence.request.client]
            if sequence.request.params.beams is not None:
                number = firsts.setdefault(sequence.group, number)
            if number > self._share:
                beyond.append(sequence)
        return beyond[::-1]
