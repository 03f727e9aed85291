"""Prompts whose blocks stores have, for schedulers that look for them there."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_parallm.config import SchedulerConfig
from mlx_parallm.generation.kv_cache.stores import BlockStore
from mlx_parallm.types.request import EVERYBODY, CacheScope, GenerateRequest, SamplingParams
from mlx_parallm.types.step import ScheduledBatch
from tests.dict_store import DictFetch, DictStore
from tests.scheduler_harness import SchedulerHarness

SIZE = 4
PROMPT = tuple(7 * i % 47 + 1 for i in range(30))
OTHER = tuple(11 * i % 43 + 2 for i in range(30))
#: Blocks of the prompts that may be found: one token is computed in any case.
NUM_FOUND = 7
LONG = tuple(13 * i % 41 + 3 for i in range(60))
WIDE = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)


class CountingStore(DictStore):
    """Writes down what it is asked, with the number of blocks."""

    def __init__(self, *, holds_back: bool = False) -> None:
        super().__init__(holds_back=holds_back)
        self.calls: list[tuple[str, int]] = []
        self.busy = False

    @property
    def is_busy(self) -> bool:
        return self.busy

    def find(self, contents: Sequence[bytes]) -> int:
        self.calls.append(("find", len(contents)))
        return super().find(contents)

    def fetch(self, contents: Sequence[bytes]) -> DictFetch:
        self.calls.append(("fetch", len(contents)))
        return super().fetch(contents)


def harness_of(*stores: BlockStore, num_blocks: int = 40, **settings: object) -> SchedulerHarness:
    return SchedulerHarness(num_blocks=num_blocks, stores=stores, **settings)  # type: ignore[arg-type]


def ask(
    harness: SchedulerHarness,
    name: str,
    prompt: Sequence[int] = PROMPT,
    *,
    max_tokens: int = 1,
    client: str = "",
    priority: int = 0,
    salt: str | None = None,
    scope: CacheScope = EVERYBODY,
    **params: int,
) -> None:
    harness.add(
        GenerateRequest(
            request_id=name,
            model="m",
            prompt_ids=tuple(prompt),
            params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params),  # type: ignore[arg-type]
            client=client,
            priority=priority,
            cache_salt=salt,
            scope=scope,
        )
    )


def fill_store(store: BlockStore, *prompts: Sequence[int]) -> None:
    """Let a process that ends compute prompts and save them."""
    harness = harness_of(store)
    for number, prompt in enumerate(prompts or [PROMPT]):
        ask(harness, str(number), prompt)
    harness.drain()
    if isinstance(store, CountingStore):
        store.calls.clear()


def num_filled(harness: SchedulerHarness) -> int:
    return sum(len(batch.moves.filled) for batch in harness.batches)


def num_computed(harness: SchedulerHarness) -> int:
    return sum(batch.num_tokens for batch in harness.batches)


def saved(batches: Sequence[ScheduledBatch]) -> list[bytes]:
    return [content for batch in batches for _, content in batch.moves.saved]
