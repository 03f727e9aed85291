"""Prefixes that come from a peer give what they give from memory, bit for bit, or are not read."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

from mlx_parallm.generation.kv_cache.peer.exports import Exports
from mlx_parallm.generation.kv_cache.peer.peers import PeerFetch, Peers
from mlx_parallm.generation.kv_cache.stores import BlockStore, Fetch, StoredBlock, StoreStats
from mlx_parallm.types.content import PendingContent
from mlx_parallm.types.request import BaseWeights, GenerateRequest, PolicyWeights, SamplingParams
from mlx_parallm.types.step import SampledToken
from mlx_parallm.types.work import EVERYBODY, CacheScope
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.model_runner import ModelRunner
from tests.integration.test_block_moves import quantised, runner_of
from tests.integration.test_parity_generate import (
    BLOCK_SIZE,
    NEW_TOKENS,
    loaded_model,
    random_prompt,
)
from tests.integration.test_stored_prefixes import MakeRunner, StoredSession
from tests.kv_peers import ExportLink, listed

PROMPT = random_prompt(41)
NUM_CACHED = 40


class NowStore(BlockStore):
    """A store of peers without a thread: a fetch ends before it returns."""

    tier, is_own = "peer", False

    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    def find(self, contents: Sequence[bytes]) -> int:
        asyncio.run(self.peers.refresh())
        return self.peers.find(contents)[0]

    def fetch(self, contents: Sequence[bytes]) -> Fetch:
        fetch, (count, name) = PeerFetch(), self.peers.find(contents)
        asyncio.run(self.peers.read(name, contents[:count], fetch))
        return fetch

    def put(self, block: StoredBlock) -> None:
        """Keep nothing."""

    def has(self, content: bytes) -> bool:
        return True

    def clear(self) -> None:
        self.peers.clear()

    @property
    def stats(self) -> StoreStats:
        return StoreStats(read_blocks=self.peers.num_read)


@dataclass(frozen=True)
class Mix:
    """All that the KV of a prompt depends on."""

    weights: str = "weights"
    adapter: str = ""
    bits: int = 0
    identity: str = "same"
    salt: str | None = None
    scope: str = ""

    @property
    def owner(self) -> str:
        return f"{self.identity} {self.bits}"


CHOICES: dict[str, Sequence[Any]] = {
    "weights": ("weights", "update"),
    "adapter": ("", "tuned"),
    "bits": (0, 8),
    "identity": ("same", "another device", "another RoPE", "another release"),
    "salt": (None, "a tenant's"),
    "scope": ("", "a key's"),
}


class PeerSession(StoredSession):
    """A process that computes one mix, and answers peers."""

    def __init__(
        self, mix: Mix, make_runner: MakeRunner, stores: Sequence[BlockStore] = ()
    ) -> None:
        self.exports = Exports(mix.owner, 1)
        super().__init__(make_runner, stores, exports=self.exports)
        self.mix = mix
        content = PendingContent(f"{mix.weights} {mix.adapter}")
        self.weights = PolicyWeights(BaseWeights(lasting=content, identity=mix.owner))

    @property
    def block_bytes(self) -> int:
        return self.device.runner._blocks.block_bytes

    def serve(self) -> None:
        """Take a turn for a peer."""
        self.tiers.answer_peers()
        self.step()

    def complete(self) -> dict[int, list[SampledToken]]:
        """Return the tokens of a prompt, with all log-probabilities."""
        self.tokens.clear()
        request = GenerateRequest(
            request_id="r",
            model="m",
            prompt_ids=PROMPT,
            params=SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, logprobs=4),
            cache_salt=self.mix.salt,
            scope=CacheScope(self.mix.scope) if self.mix.scope else EVERYBODY,
        )
        self.scheduler.add(request, seed=0, end_ids=frozenset(), weights=self.weights)
        self.finish()
        tokens = self.tokens.items()
        return {index: [replace(each, seq_id=0) for each in row] for (_, index), row in tokens}


def beside(peer: PeerSession, mix: Mix) -> PeerSession:
    """Return a new process with a peer."""
    link = ExportLink(peer.exports, peer.serve)
    store = NowStore(Peers(listed(link), mix.owner, peer.block_bytes))
    return PeerSession(mix, lambda: used_again(mix.bits), [store])


def new_runner(bits: int) -> ModelRunner:
    attention = quantised(bits) if bits else ReferenceAttention(BLOCK_SIZE)
    return runner_of(loaded_model("llama"), attention)


@cache
def used_again(bits: int) -> ModelRunner:
    """Return a runner of processes that come one after the other: each begins with no block."""
    return new_runner(bits)


@cache
def computed(mix: Mix) -> tuple[PeerSession, Any, Any]:
    """Return a process that has computed a mix, and what it gave, cold and from memory."""
    session = PeerSession(mix, lambda: new_runner(mix.bits))
    cold, memory = session.complete(), session.complete()
    assert session.cached["r"] == NUM_CACHED
    return session, cold, memory


def random_mixes(count: int) -> list[tuple[Mix, Mix]]:
    """Return pairs, of which half are equal and others differ in few fields."""
    draw = random.Random(count)
    pairs: list[tuple[Mix, Mix]] = []
    for _ in range(count):
        first = {name: draw.choice(values) for name, values in CHOICES.items()}
        changed = draw.sample(list(CHOICES), draw.choice([0, 0, 1, 2]))
        second = first | {name: draw.choice(CHOICES[name]) for name in changed}
        pairs.append((Mix(**first), Mix(**second)))
    return pairs


@pytest.mark.parametrize("count", [12, pytest.param(1000, marks=pytest.mark.slow)])
def test_mixes_of_identities_give_what_memory_gives_or_are_not_read(count: int) -> None:
    num_equal = 0
    for first, second in random_mixes(count):
        peer, _, memory = computed(first)
        session = beside(peer, second)
        answer = session.complete()
        (stats,) = session.tiers.stats().tiers
        if first == second:
            num_equal += 1
            assert answer == memory
            assert session.cached["r"] == stats.hit_tokens == NUM_CACHED
        else:
            assert stats.store.read_blocks == session.cached["r"] == 0
            assert answer == computed(second)[1]
    assert count / 5 < num_equal < count


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "deepseek_v3"])
def test_each_family_gives_what_memory_gives(name: str) -> None:
    def process(stores: Sequence[BlockStore] = ()) -> StoredSession:
        attention = ReferenceAttention(BLOCK_SIZE)
        return StoredSession(
            lambda: runner_of(loaded_model(name), attention), stores, exports=Exports("o", 1)
        )

    first = process()
    first.ask("cold")
    memory = first.ask("memory")
    exports = first.tiers.exports
    assert exports is not None

    def serve() -> None:
        first.tiers.answer_peers()
        first.step()

    link = ExportLink(exports, serve)
    num_bytes = first.device.runner._blocks.block_bytes
    second = process([NowStore(Peers(listed(link), "o", num_bytes))])
    assert second.ask("again") == memory
    assert second.cached["again"] == first.cached["memory"] > 0
