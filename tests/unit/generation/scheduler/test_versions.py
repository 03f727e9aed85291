"""Random rollouts, updates, pauses and aborts: every token is of the weights that it names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from random import Random

import pytest

from mlx_parallm.config import SchedulerConfig, SpeculativeConfig
from mlx_parallm.engine import adapter_slots
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from tests.version_harness import BAD_DIGEST, VersionHarness

pytestmark = pytest.mark.slow

NUM_PARTS = 8
RUNS_PER_PART = 125

# Prompts are cut from a few texts, so that prefixes are often shared.
TEXTS = tuple(tuple((7 * i + 13 * text) % 47 + 1 for i in range(30)) for text in range(2))
LONGEST_PROMPT = 36
NAMES = ("p", "q", "r", "s")
# Few, so that names often share one and often get back what they had.
DIGESTS = ("d0", "d1", "d2", "d3", "d4")
SPECULATIVE = tuple(
    SpeculativeConfig(
        method="ngram" if model is None else "draft_model",
        model=model,
        num_speculative_tokens=3,
        prompt_lookup_min=1,
        prompt_lookup_max=3,
    )
    for model in (None, "draft")
)


class Interleaving:
    """One random order of everything that may happen."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.harness = self.make_harness()
        self._numbers = count()

    def make_harness(self) -> VersionHarness:
        """Return the engine to which everything happens."""
        return _random_harness(self.random)

    def events(self) -> list[tuple[Callable[[], None], float]]:
        """Return what may happen, and how often it does."""
        return [
            (self.step, 10),
            (self.add, 6),
            (self.load, 4),
            (self.unload, 1),
            (self.replace_base, 1),
            (self.end_one, 1),
            (self.pause, 1),
            (self.reset, 0.5),
            (self.fail, 0.2),
        ]

    def run(self, num_events: int = 36) -> Counter[str]:
        """Let it happen; what was seen."""
        actions, weights = zip(*self.events(), strict=True)
        for action in self.random.choices(actions, weights, k=num_events):
            action()
        self.harness.drain()
        return self.harness.seen

    def step(self) -> None:
        for _ in range(self.random.randint(1, 3)):
            self.harness.step()

    def add(self) -> None:
        self.harness.add(self.next_request())

    def next_request(self) -> GenerateRequest:
        """Return a request of no name that is loaded, or of one."""
        adapter = self.random.choice([None, *self.harness.names])
        request = _random_request(self.random, next(self._numbers), adapter)
        if self.harness.ended and self.random.random() < 0.4:
            # It goes on from what another gave: the next turn of a conversation.
            text = self.random.choice(self.harness.ended[-3:])
            request = replace(request, prompt_ids=text[:LONGEST_PROMPT])
        return request

    def load(self) -> None:
        digest = self.random.choice([*DIGESTS, BAD_DIGEST])
        name = self.random.choice(NAMES)
        is_pinned = self.random.choice([None, None, True, False])
        self.harness.load(name, digest, f"v{next(self._numbers)}", is_pinned=is_pinned)

    def unload(self) -> None:
        if self.harness.names:
            self.harness.unload(self.random.choice(sorted(self.harness.names)))

    def replace_base(self) -> None:
        number = next(self._numbers)
        # One of few: those before come back too.
        self.harness.replace_base(self.random.choice(["", "b0", "b1"]), f"base{number}")

    def end_one(self) -> None:
        if self.harness.tracked:
            end = self.random.choice([self.harness.abort, self.harness.cancel])
            end(self.random.choice(sorted(self.harness.tracked)))

    def pause(self) -> None:
        if self.harness.engine.is_paused:
            self.harness.engine.is_paused = False
        else:
            self.harness.pause()

    def reset(self) -> None:
        self.harness.reset_prefix_cache(reset_running=self.random.random() < 0.5)

    def fail(self) -> None:
        self.harness.fails_next = True


def _random_harness(randomness: Random) -> VersionHarness:
    speculative = randomness.choice([None, None, *SPECULATIVE])
    return VersionHarness(
        SchedulerConfig(
            max_num_seqs=randomness.choice([2, 4, 8]),
            max_num_batched_tokens=randomness.choice([6, 16, 64]),
            max_num_seqs_per_client=randomness.choice([None, None, 2]),
            max_loras=randomness.choice([1, 2, 3]),
        ),
        num_blocks=randomness.choice([12, 20, 60]),
        has_state=randomness.random() < 0.2,
        keeps_states=randomness.random() < 0.5,
        caching=randomness.random() < 0.9,
        runs_ahead=randomness.random() < 0.5,
        speculative=speculative,
        max_loaded=randomness.choice([2, 4]),
    )


def _random_request(randomness: Random, number: int, adapter: str | None) -> GenerateRequest:
    max_tokens = randomness.choice([0, 1, 5, 12, 12])
    return GenerateRequest(
        request_id=f"r{number}",
        model="m",
        adapter=adapter,
        prompt_ids=randomness.choice(TEXTS)[: randomness.choice([1, 4, 9, 13, 24, 30])],
        params=SamplingParams(
            n=randomness.choice([1, 1, 2, 4]),
            max_tokens=max_tokens,
            min_tokens=0 if max_tokens == 0 else randomness.choice([0, 1]),
            ignore_eos=randomness.random() < 0.8,
            seed=randomness.randint(0, 3),
            stop=randomness.choice([(), (), ("\x05", "\x09")]),
            prompt_logprobs=randomness.choice([None, None, 1]),
            prompt_logprobs_start=randomness.choice([0, 0, 7, 20]),
            speculative=randomness.random() < 0.8,
        ),
        priority=randomness.choice([-1, 0, 0, 0, 1]),
        client=randomness.choice("ab"),
        cache_salt=randomness.choice([None, None, "salt"]),
    )


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_every_token_is_of_the_weights_that_it_names(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if part % 2:
        # So that adapters starve in runs as short as these.
        monkeypatch.setattr(adapter_slots, "MAX_PASSED", 1)
    seen = Counter[str]()
    for seed in range(part * RUNS_PER_PART, (part + 1) * RUNS_PER_PART):
        try:
            seen += Interleaving(seed).run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    # None of what makes this hard was missing.
    wanted = ["straddled", "whole", "cached", "scored", "mixed KV", "evicted", "failed"]
    wanted += ["unloaded while used", "several adapters in a batch"]
    assert all(seen[case] >= 5 for case in wanted), seen
