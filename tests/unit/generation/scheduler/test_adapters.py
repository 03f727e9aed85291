"""Sequences that wait for an adapter slot neither starve nor delay those that need none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlx_parallm.config import SchedulerConfig
from mlx_parallm.engine import adapter_slots
from mlx_parallm.types.errors import OverloadedError
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from tests.version_harness import BAD_DIGEST, VersionHarness, adapter

PROMPT = tuple(range(1, 14))
MAX_PASSED = 3


@pytest.fixture(autouse=True)
def starve_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_slots, "MAX_PASSED", MAX_PASSED)


def harness(**settings: int) -> VersionHarness:
    world = VersionHarness(SchedulerConfig(max_loras=1, **settings))
    for name in ("a", "b"):
        world.load(name, f"digest-{name}", f"version-{name}")
    return world


def ask(
    name: str,
    adapter: str | None,
    *,
    max_tokens: int = 4,
    client: str = "",
    priority: int = 0,
    first: int = 1,
) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0)
    return GenerateRequest(
        request_id=name,
        model="m",
        adapter=adapter,
        prompt_ids=(first, *PROMPT[1:]),
        params=params,
        client=client,
        priority=priority,
    )


def steps_until_ended(world: VersionHarness, name: str, limit: int = 400) -> int:
    for step in range(limit):
        if name not in world.tracked:
            return step
        world.step()
    raise AssertionError(f"{name} does not end")


def test_an_adapter_in_use_makes_no_room_for_another() -> None:
    world = VersionHarness(SchedulerConfig(), max_loaded=2)
    for name in "ab":
        world.load(name, f"digest-{name}", "1")
        world.add(ask(name, name))
    with pytest.raises(OverloadedError):
        world.policies.load(adapter("c", "digest-c", "1"))
    # Nor does one that could not be used push out another.
    world.drain()
    assert not world.load("c", BAD_DIGEST, "1")
    assert world.load("c", "digest-c", "1")
    assert world.names.keys() == {"b", "c"}
    world.drain()


def test_labels_count_on_from_the_one_before() -> None:
    world = VersionHarness(SchedulerConfig())
    labels = [None, "7", None, "step", None]
    infos = [
        world.policies.load(adapter("a", f"digest-{number}", label))
        for number, label in enumerate(labels)
    ]
    assert [info.version for info in infos] == ["1", "7", "8", "step", "5"]


def test_others_of_the_same_client_pass_by_one_that_waits_for_a_slot() -> None:
    world = harness()
    world.add(ask("long", "a", max_tokens=30))
    world.step()
    world.add(ask("waits", "b"))
    world.add(ask("plain", None))
    world.add(ask("same", "a"))
    steps_until_ended(world, "plain")
    steps_until_ended(world, "same")
    assert "long" in world.tracked
    assert not world.tracked["waits"].samples[0].tokens
    world.drain()


def test_an_endless_stream_for_one_adapter_does_not_keep_out_another() -> None:
    world = harness(max_num_seqs=4)
    world.add(ask("first", "a", max_tokens=20))
    world.step()
    world.add(ask("waits", "b"))
    for number in range(10 * MAX_PASSED):
        world.add(ask(f"a{number}", "a"))
    steps_until_ended(world, "waits")
    assert len(world.tracked) > MAX_PASSED
    world.drain()


def test_one_that_starves_behind_what_it_makes_way_for_gets_its_turn() -> None:
    """Check that the preempted first sequence runs again, before the one that starves."""
    world = harness(max_num_seqs=3)
    world.add(ask("first", "a", max_tokens=30))
    world.step()
    world.add(ask("waits", "b"))
    for number in range(2 * MAX_PASSED):
        world.add(ask(f"a{number}", "a", max_tokens=1, client="other", priority=-1))
        world.step()
    world.reset_prefix_cache(reset_running=True)
    steps_until_ended(world, "waits")
    world.drain()


def test_one_whose_client_may_run_no_more_keeps_no_adapter_out() -> None:
    world = harness(max_num_seqs_per_client=1)
    world.add(ask("long", "a", max_tokens=30, client="other"))
    world.step()
    world.add(ask("waits", "b", client="limited"))
    world.step()
    world.add(ask("plain", None, max_tokens=30, client="limited"))
    world.step()
    for number in range(2 * MAX_PASSED):
        world.add(ask(f"a{number}", "a", max_tokens=1, client=f"client-{number}"))
        steps_until_ended(world, f"a{number}", limit=4)
    assert {"plain", "long", "waits"} == world.tracked.keys()
    world.drain()


def test_an_update_begins_a_prompt_anew_and_lets_running_samples_go_on() -> None:
    world = harness(max_num_batched_tokens=8, max_num_seqs=4)
    world.add(ask("running", "a", max_tokens=12))
    for _ in range(4):
        world.step()
    assert world.tracked["running"].samples[0].tokens
    world.add(ask("beginning", "a", first=2))
    world.step()
    running, beginning = (world.tracked[name].samples[0] for name in ("running", "beginning"))
    world.load("a", "digest-new", "version-new")
    world.drain()
    assert {*running.versions} == {"version-a", "version-new"}
    assert {*beginning.versions} == {"version-new"}
    # The harness sees to it that no KV of another version was read for those.
    assert all(choice.read == {"/digest-new"} for choice in beginning.choices)


def test_nobody_finds_what_was_computed_with_both_versions() -> None:
    world = harness()
    world.add(ask("straddling", "a", max_tokens=20))
    while len(world.tracked["straddling"].samples[0].tokens) < 3:
        world.step()
    world.load("a", "digest-new", "version-new")
    world.drain()
    assert world.seen["straddled"] == 1
    # Both versions, asked to go on from its text; the harness looks at what they read.
    world.load("b", "digest-a", "version-back")
    for name in "ab":
        world.add(replace(ask(name, name), prompt_ids=world.ended[0]))
    world.drain()
