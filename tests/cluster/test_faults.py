"""Ranks that die, hang, fail or differ: all end, and none answers wrongly."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mlx_parallm.distributed.leading import LOST
from tests.cluster.faulty_ranks import CUT, NUM_TRIES, Task
from tests.cluster.forked_worlds import World, Worlds
from tests.cluster.sharded_models import DENSE, write_model
from tests.decoder_folders import write_words

pytestmark = pytest.mark.slow

#: All ranks are gone so soon after one is lost.
GONE_S = 5.0
#: A rank counts as lost after this time without progress. On a busy machine ranks that load are
#: silent for more than a second.
SILENT_S = 4.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model of two layers, with a tokenizer."""
    folder = write_model(tmp_path_factory.mktemp("small") / "model", DENSE)
    write_words(folder, DENSE["vocab_size"])
    return folder


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    worlds = Worlds(tmp_path_factory.mktemp("worlds"))
    yield worlds
    worlds.close()


@pytest.fixture(scope="module")
def alone(worlds: Worlds, model: Path) -> dict[str, list[int]]:
    """Return the tokens of one process: the first, and those of the phase ``decode``."""
    with worlds.world(Task(str(model), phase="decode")) as world:
        assert world.wait_for_end() == {0: 0}, (world.said, worlds.log)
        return {"first": world.wait_for("tokens"), "decode": world.all_said("token")}


def begin(world: World, alone: dict[str, list[int]], phase: str) -> None:
    """Wait until a world serves as one process does, and is in a phase."""
    assert world.wait_for("tokens") == alone["first"]
    world.wait_for("token" if phase == "decode" else "begun")


def assert_tokens_right(world: World, alone: dict[str, list[int]]) -> None:
    """Check the tokens that came before a fault, after the one that began the phase."""
    tokens = world.all_said("token")
    assert tokens == alone["decode"][1 : 1 + len(tokens)]


@pytest.mark.parametrize("phase", ["prefill", "decode", "idle", "update"])
@pytest.mark.parametrize("victim", [0, 1])
def test_all_end_with_a_killed_rank(
    worlds: Worlds, model: Path, alone: dict[str, list[int]], victim: int, phase: str
) -> None:
    task = Task(str(model), phase=phase)
    with worlds.world(task, task) as world:
        begin(world, alone, phase)
        world.kill(victim)
        codes = world.wait_for_end(GONE_S)
        assert codes == {victim: -signal.SIGKILL, 1 - victim: LOST}
        assert_tokens_right(world, alone)


@pytest.mark.parametrize("phase", ["decode", "idle"])
def test_all_end_with_a_stopped_follower(
    worlds: Worlds, model: Path, alone: dict[str, list[int]], phase: str
) -> None:
    task = Task(str(model), phase=phase, timeout_s=SILENT_S)
    with worlds.world(task, task) as world:
        begin(world, alone, phase)
        world.kill(1, signal.SIGSTOP)
        assert world.wait_for_end(GONE_S + SILENT_S, 0) == {0: LOST}
        world.kill(1, signal.SIGCONT)
        assert world.wait_for_end(GONE_S) == {0: LOST, 1: LOST}
        assert_tokens_right(world, alone)


@pytest.mark.parametrize(("rank", "fault"), [(0, "no memory"), (1, "exception")])
def test_all_end_with_a_step_that_fails_on_one_rank(
    worlds: Worlds, model: Path, alone: dict[str, list[int]], rank: int, fault: str
) -> None:
    good = Task(str(model), phase="decode")
    tasks = [replace(good, fault=fault) if each == rank else good for each in (0, 1)]
    with worlds.world(*tasks) as world:
        begin(world, alone, "decode")
        assert world.wait_for_end() == {0: LOST, 1: LOST}
        assert_tokens_right(world, alone)
        cause = "RuntimeError: a step fails" if fault == "exception" else "Unable to allocate"
        assert cause in worlds.log


def test_updates_that_one_rank_refuses_change_nothing(
    worlds: Worlds, model: Path, tmp_path: Path, alone: dict[str, list[int]]
) -> None:
    good = Task(str(model), phase="refused", bad_folder=changed(model, tmp_path / "not finite"))
    tasks = [good, replace(good, fault="no memory to prepare")]
    with worlds.world(*tasks) as world:
        assert world.wait_for_end() == {0: 0, 1: 0}, world.said
    digests, others = world.all_said("digests")
    assert digests == others
    assert world.all_said("version") == ["default"]
    first, after = world.all_said("tokens")
    assert first == after == alone["first"]
    (problems,) = world.all_said("problems")
    not_finite, shape, memory, part = problems
    assert "NaN" in not_finite
    assert "NaN" in part
    assert part.endswith("(rank 1)")
    assert "[3, 64]" in shape
    assert "Unable to allocate" in memory
    assert "needs 256 bytes" in memory
    (used,) = world.all_said("memory", rank=1)
    assert len(used) >= NUM_TRIES * len(problems)
    assert set(used[4:8]) == set(used[4:]), "memory is left behind"


def test_a_slow_rank_is_waited_for(
    worlds: Worlds, model: Path, alone: dict[str, list[int]]
) -> None:
    tasks = [Task(str(model), phase="slow", fault=fault) for fault in ("", "slow")]
    with worlds.world(*tasks) as world:
        assert world.wait_for_end() == {0: 0, 1: 0}, world.said
    assert world.all_said("tokens") == [alone["first"]]
    assert all(tokens == alone["first"] for tokens in world.all_said("slow_tokens"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 5}, "setting.scheduler.max_num_seqs is 5, not 4"),
        ({"version": "0.0.1"}, "version of mlx is 0.0.1, not "),
        ({"folder": "layers"}, "config of small.num_hidden_layers is 3, not 2"),
        ({"folder": "weights"}, "files of small is "),
    ],
)
def test_a_rank_that_differs_is_refused(
    worlds: Worlds, model: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    if "folder" in changes:
        changes = {"folder": changed(model, tmp_path / changes["folder"])}
    task = Task(str(model))
    with worlds.world(task, replace(task, **changes)) as world:
        assert world.wait_for_end() == {0: 1, 1: 1}
    for rank in (0, 1):
        (refusal,) = world.all_said("refusal", rank)
        assert refusal.startswith("Rank 1 differs from rank 0: ")
        assert message in refusal


def changed(model: Path, folder: Path) -> str:
    """Write a model that differs in what the folder's name says."""
    shutil.copytree(model, folder)
    weights = folder / "model.safetensors"
    match folder.name:
        case "weights":
            other = write_model(folder / "other", DENSE, seed=1)
            shutil.move(other / "model.safetensors", weights)
        case "layers":
            (folder / "config.json").write_text(json.dumps(DENSE | {"num_hidden_layers": 3}))
        case _:
            arrays = load_file(weights)
            arrays[CUT][-1] = np.nan
            save_file(arrays, weights)
    return str(folder)


def test_a_missing_rank_is_named(worlds: Worlds, model: Path) -> None:
    with worlds.world(Task(str(model), join_s=1.0), None) as world:
        assert world.wait_for_end() == {0: -signal.SIGKILL}
    assert "error: Rank 1 (127.0.0.1:" in worlds.log


def test_a_port_that_is_taken_is_named(worlds: Worlds, model: Path) -> None:
    task = Task(str(model), join_s=3.0)
    with worlds.world(task, task, taken=1) as world:
        assert world.wait_for_end() == {0: 1, 1: 1}
    (refusal,) = world.all_said("refusal", rank=1)
    assert "The ranks cannot be joined by ring: [ring] Couldn't bind" in refusal
