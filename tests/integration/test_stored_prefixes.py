"""Prefixes that come back from stores give what they give from memory, bit for bit."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_parallm.config import SpeculativeConfig
from mlx_parallm.generation.device_runner import DeviceRunner
from mlx_parallm.generation.kv_cache.disk.store import DiskStore
from mlx_parallm.generation.kv_cache.host_store import HostStore
from mlx_parallm.generation.kv_cache.peer.exports import Exports
from mlx_parallm.generation.kv_cache.stores import BlockStore
from mlx_parallm.generation.kv_cache.tiers import Tiers
from mlx_parallm.types.content import PendingContent
from mlx_parallm.types.request import BaseWeights, PolicyWeights
from mlx_parallm.types.step import SampledToken
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.model_runner import ModelRunner
from mlx_parallm.worker.weights.loader import LoadedModel
from tests.compiled_attention import CompiledAttention
from tests.dict_store import DictStore
from tests.integration.test_block_moves import (
    NUM_BLOCKS,
    OneModel,
    bfloat16_model,
    quantised,
    runner_of,
)
from tests.integration.test_parity_generate import (
    BLOCK_SIZE,
    Session,
    loaded_model,
    random_prompt,
)
from tests.integration.test_speculation import with_draft

PROMPT = random_prompt(41)
NUM_CACHED = 40
OWNER = "ab" * 32
MakeRunner = Callable[[], ModelRunner]
slow = pytest.mark.slow
#: Windows, windows with sinks, latent attention, and more.
FAMILIES = ("gemma3_text", "gpt_oss", "deepseek_v3")
MORE_FAMILIES = ("mistral", "gemma2", "gemma3n", "gemma4", "opt", "qwen3_moe", "deepseek_v32")
#: Layers with KV beside a gated delta rule, or beside convolutions; states alone.
HYBRIDS = ("qwen3_5", "lfm2", "mamba2")
#: A request of each kind; the seed makes samples the same.
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "samples": {"n": 3, "temperature": 1.0, "seed": 5},
    "scored": {"prompt_logprobs": 2, "prompt_logprobs_start": 30},
}


class StoredSession(Session):
    """A process with a runner and an empty pool of its own, above stores."""

    def __init__(
        self,
        make_runner: MakeRunner,
        stores: Sequence[BlockStore],
        *,
        speculative: SpeculativeConfig | None = None,
        digest: str | None = "weights",
        exports: Exports | None = None,
    ) -> None:
        runner = make_runner()
        self.device = OneModel(runner)
        plan: Any = SimpleNamespace(info=runner.info, prepares_shapes=False)
        worker: Any = self.device
        has_draft = speculative is not None and speculative.model is not None
        self.tiers = Tiers(
            stores,
            block_bytes=1,
            state_bytes=runner.info.state_bytes,
            draft=PendingContent("draft") if has_draft else None,
            exports=exports,
            min_saved=1,
            min_fetched=1,
        )
        self._is_woken = threading.Event()
        self.tiers.wake_by(self._is_woken.set)
        super().__init__(
            DeviceRunner(worker, "m", plan),
            num_blocks=NUM_BLOCKS,
            speculative=speculative,
            tiers=self.tiers,
            has_kv=runner._blocks.block_bytes > 0,
            weights=PolicyWeights(BaseWeights(lasting=PendingContent(digest), identity="same")),
        )
        self.num_filled = 0

    def ask(self, name: str, prompt: tuple[int, ...] = PROMPT, **params: Any) -> Any:
        """Return what a request gives: its samples' tokens with all log-probabilities."""
        seed = params.pop("seed", 0)
        self.tokens.clear()
        self.add(name, prompt, logprobs=4, seed=seed, **params)
        self.finish()
        return {
            index: [replace(token, seq_id=0) for token in tokens]
            for (_, index), tokens in self.tokens.items()
        }

    def finish(self) -> None:
        while self.has_work():
            if self.scheduler.stats().num_running == 0 and self.tiers.fetches.num_reserved:
                self._is_woken.wait(0.05)  # time limit: a read may become late meanwhile
            self.step()
        self.scheduler.check_integrity()
        self.tiers.check_integrity([])


def opened(tier: str, folder: Path) -> BlockStore:
    if tier == "host":
        return HostStore(1 << 28)
    return DiskStore(folder, OWNER, 1 << 28) if tier == "disk" else DictStore()


def runners(loaded: LoadedModel, attention: Any = ReferenceAttention) -> MakeRunner:
    """Return what makes runners of a model, each with a pool of its own."""
    return lambda: runner_of(loaded, attention(BLOCK_SIZE))


def ids_of(samples: dict[int, list[SampledToken]]) -> dict[int, list[int]]:
    return {index: [token.token_id for token in tokens] for index, tokens in samples.items()}


def assert_comes_back(
    make_runner: MakeRunner,
    folder: Path,
    *,
    tier: str = "dict",
    speculative: SpeculativeConfig | None = None,
) -> None:
    """Compare a hit of memory with one of a store, in the same and in another process."""
    store = opened(tier, folder)
    first = StoredSession(make_runner, [store], speculative=speculative)
    cold = {name: first.ask(name, **params) for name, params in REQUESTS.items()}
    memory = {name: first.ask(name, **params) for name, params in REQUESTS.items()}
    cached = first.cached
    assert cached["greedy"] == cached["samples"] == NUM_CACHED
    first.scheduler.reset_prefix_cache(reset_running=False)
    for session in (first, None):
        if tier == "disk" and session is None:
            store.close()
            store = opened(tier, folder)
        for name, params in REQUESTS.items():
            # Memory has nothing of it.
            again = session or StoredSession(make_runner, [store], speculative=speculative)
            again.scheduler.reset_prefix_cache(reset_running=False)
            assert again.ask(name, **params) == memory[name]
            assert ids_of(memory[name]) == ids_of(cold[name])
            assert again.cached[name] == cached[name]
            (stats,) = again.tiers.stats().tiers
            assert stats.hit_tokens >= cached[name]
    store.close()


@pytest.mark.parametrize("tier", ["dict", "host", "disk"])
@pytest.mark.parametrize("attention", [ReferenceAttention, CompiledAttention])
def test_each_tier_gives_what_memory_gives(tier: str, attention: Any, tmp_path: Path) -> None:
    loaded = loaded_model("llama")
    assert_comes_back(runners(loaded, attention), tmp_path, tier=tier)


@pytest.mark.parametrize(
    "name", [*FAMILIES, *(pytest.param(name, marks=slow) for name in MORE_FAMILIES)]
)
def test_each_family_gives_what_memory_gives(name: str, tmp_path: Path) -> None:
    loaded = loaded_model(name)
    assert_comes_back(runners(loaded), tmp_path)


@pytest.mark.parametrize(
    ("name", "bits"),
    [("llama", 8), ("llama", 4), ("gemma3_text", 8), pytest.param("deepseek_v3", 4, marks=slow)],
)
def test_quantised_kv_gives_what_memory_gives(name: str, bits: int, tmp_path: Path) -> None:
    assert_comes_back(lambda: runner_of(loaded_model(name), quantised(bits)), tmp_path)


def test_kv_of_16_bits_gives_what_memory_gives(tmp_path: Path) -> None:
    loaded = bfloat16_model("llama")
    make = runners(loaded)
    store = DictStore()
    first = StoredSession(make, [store])
    first.ask("cold")
    memory = first.ask("memory")
    assert StoredSession(make, [store]).ask("again") == memory


@pytest.mark.parametrize("attention", [ReferenceAttention, CompiledAttention])
def test_a_draft_model_gives_what_memory_gives(attention: Any, tmp_path: Path) -> None:
    vocab = loaded_model("llama").config["vocab_size"]
    make = partial(with_draft, "llama", attention, noise=0.01, vocab=vocab)
    config = SpeculativeConfig(method="draft_model", model="draft", disable_by_batch_size=8)
    assert_comes_back(make, tmp_path, speculative=config)


def test_proposals_from_the_prompt_give_what_memory_gives(tmp_path: Path) -> None:
    config = SpeculativeConfig(prompt_lookup_min=1, disable_by_batch_size=8)
    make = runners(loaded_model("llama"))
    assert_comes_back(make, tmp_path, speculative=config)


@pytest.mark.parametrize(
    ("name", "tier", "attention"),
    [
        ("qwen3_5", "disk", CompiledAttention),
        ("mamba2", "disk", ReferenceAttention),
        ("lfm2", "host", ReferenceAttention),
        *(
            pytest.param(*each, marks=slow)
            for each in itertools.product(
                HYBRIDS, ("dict", "host", "disk"), (ReferenceAttention, CompiledAttention)
            )
        ),
    ],
)
def test_prefixes_with_states_give_what_memory_gives(
    name: str, tier: str, attention: Any, tmp_path: Path
) -> None:
    assert_comes_back(runners(loaded_model(name), attention), tmp_path, tier=tier)


@pytest.mark.parametrize("kept", [0, 1, 7, 9])
def test_what_is_left_of_a_chain_gives_the_same_tokens(kept: int) -> None:
    make = runners(loaded_model("llama"))
    store = DictStore()
    cold = StoredSession(make, [store]).ask("cold")
    for content in list(store.blocks)[kept : NUM_CACHED // BLOCK_SIZE]:
        del store.blocks[content]
    session = StoredSession(make, [store])
    assert ids_of(session.ask("again")) == ids_of(cold)
    assert session.cached["again"] == kept * BLOCK_SIZE


def test_a_longer_prompt_finds_what_a_shorter_one_and_its_answer_left() -> None:
    make = runners(loaded_model("llama"))
    store = DictStore()
    first = StoredSession(make, [store])
    (answer,) = ids_of(first.ask("turn", PROMPT[:29], max_tokens=12)).values()
    longer = (*PROMPT[:29], *answer, *random_prompt(10))
    left = DictStore()
    left.blocks.update(store.blocks)
    memory = first.ask("memory", longer)
    session = StoredSession(make, [left])
    assert session.ask("again", longer) == memory
    assert session.cached["again"] == first.cached["memory"] == 40


def test_preempted_sequences_come_back_from_host_memory() -> None:
    make = runners(loaded_model("llama"))
    prompts = [random_prompt(40, seed=seed) for seed in range(5)]
    calm = StoredSession(make, [])
    wanted = [ids_of(calm.ask(str(n), each, max_tokens=20)) for n, each in enumerate(prompts)]
    busy = StoredSession(make, [HostStore(1 << 28)])
    for number, prompt in enumerate(prompts):
        busy.add(str(number), prompt, max_tokens=20)
    busy.finish()
    stats = busy.scheduler.stats()
    assert stats.num_preemptions > 0
    (host,) = busy.tiers.stats().tiers
    assert host.store.read_blocks > 0
    actual = [{0: busy.result(str(number)).tokens} for number in range(len(prompts))]
    assert actual == wanted
