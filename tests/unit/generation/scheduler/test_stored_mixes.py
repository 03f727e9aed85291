"""Random mixes of all that decides KV, over one folder: no block of another one is ever read."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest

from mlx_parallm.generation.kv_cache.disk.store import DiskStore
from mlx_parallm.generation.kv_cache.host_store import HostStore
from mlx_parallm.generation.kv_cache.stores import BlockStore
from mlx_parallm.types.content import PendingContent
from mlx_parallm.types.model_input import ModelInput
from mlx_parallm.types.request import (
    EVERYBODY,
    INPUT_TOKEN,
    BaseWeights,
    CacheScope,
    GenerateRequest,
    PolicyWeights,
    SamplingParams,
    WeightsVersion,
)
from mlx_parallm.types.step import ScheduledBatch, ScheduledSequence
from tests.block_simulator import GARBAGE
from tests.input_harness import InputHarness, InputRunner, rows_input
from tests.kv_disk import Disk
from tests.scheduler_harness import Tracked

TEXTS = tuple(tuple((7 * i + 13 * text) % 40 + 1 for i in range(40)) for text in range(2))
#: Images of equal shapes, whose rows mean other tokens.
IMAGES = ((41, 42, 43, 44, 45), (45, 44, 43, 42, 41))
#: DIFFERENCES: fields of requests, the more often the rarer they matter.
DIFFERENCES = ("image", "image", "adapter", "adapter", "salt", "scope", "tokens")
#: OPAQUE begins the marks of what no store may have.
OPAQUE = "opaque"


@dataclass(frozen=True)
class Kind:
    """All that decides the blocks of a process, besides its requests."""

    weights: str | None
    dtype: str
    block_size: int
    has_state: bool

    @property
    def owner(self) -> str:
        """Stands in for the digest of an ``Identity``."""
        return hashlib.sha256(
            f"{self.dtype} {self.block_size} {self.has_state}".encode()
        ).hexdigest()

    @property
    def mark(self) -> str:
        return f"{OPAQUE if self.weights is None else self.weights}, {self.dtype}"


class MarkingRunner(InputRunner):
    """Writes into each block what it is of, and checks what is read."""

    def __init__(self, num_blocks: int, block_size: int, num_slots: int, *, has_state: bool):
        super().__init__(num_blocks, block_size, num_slots, has_state=has_state)
        #: By sequence.
        self.marks: dict[int, str] = {}

    def content_of(self, row: ScheduledSequence) -> str:
        return self.marks[row.seq_id]

    def _read_contents(self, row: ScheduledSequence) -> frozenset[str]:
        contents = super()._read_contents(row)
        # A row behind a step that failed runs in vain.
        is_in_vain = GARBAGE in self._read(row)
        assert is_in_vain or contents == {self.marks[row.seq_id]}, "another one's KV was read"
        return contents

    def _move(self, batch: ScheduledBatch) -> tuple[tuple[bytes, bytes], ...]:
        saved = [self._block_contents[block] for block, _ in batch.moves.saved]
        saved += [[*self._state_contents[slot]] for slot, _ in batch.moves.saved_states]
        for marks in saved:
            (mark,) = set(marks)
            assert not mark.startswith(OPAQUE), "KV was saved that no digest names"
        return super()._move(batch)


class MixedHarness(InputHarness):
    """A process of one kind, whose requests are of many."""

    def __init__(self, kind: Kind, source: Random, stores: list[BlockStore]) -> None:
        self.kind = kind
        self.marking: MarkingRunner
        super().__init__(
            num_blocks=source.choice([80, 160]) // kind.block_size,
            budget=source.choice([9, 16, 64]),
            has_state=kind.has_state,
            runs_ahead=source.random() < 0.5,
            stores=stores,
            block_size=kind.block_size,
        )
        self.base = BaseWeights(
            version=WeightsVersion(content=kind.mark),
            lasting=PendingContent(kind.weights),
            identity=kind.owner,
        )
        #: All requests of an adapter share this object.
        self.policies = {
            name: PolicyWeights(self.base, version) for name, version in ADAPTERS.items()
        }

    def make_runner(self, num_blocks: int, *, has_state: bool) -> InputRunner:
        self.marking = MarkingRunner(num_blocks, self.block_size, 4 + 3, has_state=has_state)
        return self.marking

    def add_wanted(self, wanted: Wanted, name: str) -> None:
        """Queue a request."""
        meant, ids = list(wanted.tokens), list(wanted.tokens)
        inputs: tuple[ModelInput, ...] = ()
        if wanted.image is not None:
            rows, place = wanted.image, min(wanted.place, len(ids))
            meant[place:place] = rows
            ids[place:place] = [INPUT_TOKEN] * len(rows)
            inputs = (rows_input(rows, place, cost=1, may_cut=wanted.may_cut),)
        plain = GenerateRequest(
            request_id=name,
            model="m",
            prompt_ids=tuple(meant),
            params=SamplingParams(max_tokens=wanted.max_tokens, n=wanted.n),
            client=name[-1],
            cache_salt=wanted.salt,
            scope=wanted.scope,
            # An image that may be cut is one of another family.
            extra_key=str(wanted.may_cut),
        )
        request = replace(plain, prompt_ids=tuple(ids), inputs=inputs)
        mark = f"{self.kind.mark}, {wanted.mark}"
        mark = f"{OPAQUE} {mark}" if wanted.adapter.startswith(OPAQUE) else mark
        weights = self.policies[wanted.adapter]
        self.scheduler.add(request, seed=3, end_ids=frozenset({0}), weights=weights)
        for sequence in self.scheduler._live.groups[name].sequences.values():
            self.marking.marks[sequence.seq_id] = mark
        outputs = {index: list[int]() for index in range(wanted.n)}
        self.tracked[name] = Tracked(plain, 3, outputs, content=mark)


@dataclass(frozen=True)
class Wanted:
    """The facts of a request; several of a mix have the same tokens."""

    tokens: tuple[int, ...]
    image: tuple[int, ...] | None
    place: int
    may_cut: bool
    adapter: str
    salt: str | None
    scope: CacheScope
    max_tokens: int
    n: int

    @classmethod
    def random(cls, source: Random) -> Wanted:
        return cls(
            tokens=source.choice(TEXTS)[: source.choice([5, 17, 24, 33, 36])],
            image=source.choice([None, None, None, *IMAGES]),
            place=source.choice([1, 6, 20]),
            may_cut=source.random() < 0.5,
            adapter=source.choice([*ADAPTERS, "none", "none", "none"]),
            salt=source.choice([None, None, None, "a", "b"]),
            scope=source.choice([EVERYBODY, EVERYBODY, CacheScope("a"), CacheScope("b")]),
            max_tokens=source.choice([1, 4]),
            n=source.choice([1, 1, 2]),
        )

    @property
    def mark(self) -> str:
        return f"{self.adapter}, {self.salt}, {self.scope.owner}, {self.may_cut}"


ADAPTERS: dict[str, WeightsVersion | None] = {
    "none": None,
    "one": WeightsVersion("digest 1", "v", is_lasting=True),
    "two": WeightsVersion("digest 2", "v", is_lasting=True),
    f"{OPAQUE} of the device": WeightsVersion("an id", "v"),
    f"{OPAQUE} that changes": WeightsVersion("digest 3", "v", is_cached=False, is_lasting=True),
}


def tear(source: Random, disk: Disk) -> None:
    """Damage a file in one of the ways that happen."""
    files = [path for path in disk.files() if path.stat().st_size]
    if not files:
        return
    path = source.choice(files)
    data = path.read_bytes()
    place = source.randrange(len(data))
    match source.randrange(5):
        case 0:
            path.unlink()
        case 1:
            path.write_bytes(data[:place])
        case 2:
            path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        case 3:
            # A file of the same size: what changes sizes is not this store.
            other = source.choice(files).read_bytes()
            path.write_bytes(other[: len(data)].ljust(len(data), b"\0"))
        case _:
            path.write_bytes(b"")


class Mix:
    """A few processes over one folder, one after the other."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.source = source = Random(seed)
        self.disk = Disk(folder)
        self.limit = source.choice([8_000, 40_000, 1 << 20])
        self.kinds = [
            Kind(
                weights=source.choice(["w1", "w1", "w2", None]),
                dtype=source.choice(["f32", "int8"]),
                block_size=size,
                has_state=source.random() < 0.5,
            )
            for size in source.choices([4, 4, 8], k=2)
        ]
        self.wanted = [Wanted.random(source)]
        for _ in range(5):
            # Most differ from another one in one thing.
            name = source.choice(
                ["image", "image", "adapter", "adapter", "salt", "scope", "tokens"]
            )
            change = {name: getattr(Wanted.random(source), name)}
            self.wanted.append(replace(source.choice(self.wanted), **change))
        self.num_requests = self.num_hits = 0

    def run(self) -> int:
        """Run all; return how many tokens came back from stores."""
        for _ in range(6):
            self.run_process(self.source.choice(self.kinds))
            if self.source.random() < 0.3:
                tear(self.source, self.disk)
        return self.num_hits

    def run_process(self, kind: Kind) -> None:
        source, store = self.source, self.disk.open(self.limit, owner=kind.owner)
        stores: list[BlockStore] = [store]
        if source.random() < 0.3:
            stores.insert(0, HostStore(source.choice([2_000, 1 << 20])))
        harness = MixedHarness(kind, source, stores)
        for _ in range(source.randint(4, 12)):
            self.act(harness)
            for _ in range(source.randint(0, 6)):
                harness.step(raises=source.random() < 0.02, fail_rows=int(source.random() < 0.02))
                self.turn(store, source.choice([0.0, 0.1, 0.6]))
        while harness.scheduler.has_work():
            harness.step()
            self.turn(store, 0.1)
        harness.drain()
        assert harness.tiers is not None
        tiers = harness.tiers.stats().tiers
        self.num_hits += sum(tier.hit_tokens for tier in tiers)
        if source.random() < 0.3:
            self.disk.kill(store)
        else:
            store.close()
        assert self.disk.num_bytes() <= self.limit

    def turn(self, store: DiskStore, seconds: float) -> None:
        """Let time pass, and the store's threads work."""
        self.disk.clock.pass_s(seconds)
        store.turn()
        assert self.disk.num_bytes() <= self.limit

    def act(self, harness: MixedHarness) -> None:
        """Do one thing."""
        source, event = self.source, self.source.random()
        if event < 0.75:
            self.num_requests += 1
            name = f"{self.num_requests}{source.choice('xy')}"
            harness.add_wanted(source.choice(self.wanted), name)
        elif event < 0.8 and harness.tracked:
            harness.abort(source.choice(sorted(harness.tracked)))
        elif event < 0.85:
            harness.settle()
            harness.scheduler.reset_prefix_cache(reset_running=source.random() < 0.5)
            if source.random() < 0.2 and harness.tiers is not None:
                harness.tiers.clear()
        elif event < 0.9:
            tear(source, self.disk)
        else:
            harness.now_s += source.choice([0.01, 60.0])


def test_no_block_of_another_kind_is_read_in_a_few_mixes(tmp_path: Path) -> None:
    hits = [Mix(seed, tmp_path / str(seed)).run() for seed in range(30)]
    assert sum(count > 0 for count in hits) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_no_block_of_another_kind_is_read_in_many_mixes(first: int, tmp_path: Path) -> None:
    hits = [Mix(seed, tmp_path / str(seed)).run() for seed in range(first, first + 100)]
    assert sum(count > 0 for count in hits) >= 50
