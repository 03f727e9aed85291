"""Rank 0 refuses ranks that differ from it, and says what differs on which rank."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_parallm.config import (
    EngineConfig,
    MemoryConfig,
    ModelConfig,
    RanksConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from mlx_parallm.demo_models.folders import DEMO_FOLDER
from mlx_parallm.distributed.agreement import Facts, agree, answer, difference
from mlx_parallm.distributed.facts import checkpoint_facts, process_facts
from mlx_parallm.distributed.link import FollowerLink, LeaderLink
from mlx_parallm.types.errors import ConfigError, RankLostError
from tests.fake_ranks import PATIENCE_S

#: No test waits for it.
TIMEOUT_S = 5.0
FACTS = {"backend": "cuda", "version of mlx": "0.32.4"}
Star = tuple[LeaderLink, list[FollowerLink]]


@pytest.fixture
def star() -> Iterator[Star]:
    """Return the links of rank 0 and of two followers."""
    with ExitStack() as stack:
        logs, beats = (
            {rank: [stack.enter_context(end) for end in socket.socketpair()] for rank in (1, 2)}
            for _ in range(2)
        )
        leader = LeaderLink(
            {rank: ends[0] for rank, ends in logs.items()},
            {rank: ends[0] for rank, ends in beats.items()},
        )
        yield leader, [FollowerLink(rank, logs[rank][1], beats[rank][1]) for rank in logs]


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def ignore() -> None:
    """Do nothing about a refusal."""


def compare(threads: ThreadPoolExecutor, star: Star, facts: Sequence[Facts]) -> list[Future[None]]:
    """Let all ranks compare their facts; those of rank 0 come first."""
    leader, followers = star
    own, *others = facts
    return [
        threads.submit(agree, leader, own, PATIENCE_S, ignore),
        *(
            threads.submit(answer, link, each, ignore)
            for link, each in zip(followers, others, strict=True)
        ),
    ]


def test_ranks_that_are_alike_go_on(threads: ThreadPoolExecutor, star: Star) -> None:
    for _ in range(2):
        for verdict in compare(threads, star, [FACTS, dict(reversed(FACTS.items())), FACTS]):
            verdict.result()


def test_all_ranks_raise_the_same_error(threads: ThreadPoolExecutor, star: Star) -> None:
    verdicts = compare(threads, star, [FACTS, FACTS, {**FACTS, "version of mlx": "0.32.3"}])
    errors = [str(verdict.exception()) for verdict in verdicts]
    assert set(errors) == {"Rank 2 differs from rank 0: version of mlx is 0.32.3, not 0.32.4."}
    for verdict in verdicts:
        with pytest.raises(ConfigError):
            verdict.result()


def test_a_rank_that_says_nothing_is_named(star: Star, threads: ThreadPoolExecutor) -> None:
    leader, (first, _) = star
    answered = threads.submit(answer, first, FACTS, ignore)
    with pytest.raises(RankLostError, match=r"Rank 2 .* has not replied within 0\.01 s"):
        agree(leader, FACTS, 0.01, ignore)
    leader.abort()
    with pytest.raises(RankLostError, match="Rank 0 is gone"):
        answered.result()


@pytest.mark.parametrize("goodbye", [True, False])
def test_a_rank_0_that_gives_up_is_noticed(
    star: Star, threads: ThreadPoolExecutor, goodbye: bool
) -> None:
    leader, followers = star
    answers = [threads.submit(answer, follower, FACTS, ignore) for follower in followers]
    if goodbye:
        leader.send(255, None)
    else:
        leader.abort()
    for each in answers:
        with pytest.raises(RankLostError, match="Rank 0 "):
            each.result()


def test_everything_that_differs_is_named() -> None:
    other = {"version of mlx": "0.32.3", "files of m": "x" * 200}
    assert difference(FACTS, [FACTS, other]) == (
        "Rank 2 differs from rank 0: backend is absent, not cuda; version of mlx is 0.32.3, not "
        f"0.32.4; files of m is {'x' * 80}, not absent."
    )
    assert difference(FACTS, [FACTS, FACTS]) is None


CONFIG = EngineConfig(
    models=(ModelConfig(path="/models/a", served_names=("a",)),),
    ranks=RanksConfig(rank=0, size=2),
)


def test_what_may_differ_between_machines_is_no_difference() -> None:
    other = replace(
        CONFIG,
        models=(replace(CONFIG.models[0], path="/mnt/a"),),
        ranks=RanksConfig(rank=1, size=2, host="10.0.0.1", timeout_s=TIMEOUT_S),
        kernel_cache_dir="/tmp/kernels",
        memory=MemoryConfig(mlx_cache_bytes=1, wired_bytes=2),
    )
    assert process_facts(other) == process_facts(CONFIG)


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (replace(CONFIG, scheduler=SchedulerConfig(max_num_seqs=3)), "scheduler.max_num_seqs"),
        (replace(CONFIG, seed=7), "setting.seed"),
        (replace(CONFIG, ranks=RanksConfig(size=3)), "ranks.size"),
        (replace(CONFIG, speculative=SpeculativeConfig()), "setting.speculative"),
        (replace(CONFIG, models=(ModelConfig(path="/models/a"),)), "models.0.served_names.0"),
        (replace(CONFIG, models=CONFIG.models * 2), "models.1.served_names.0"),
    ],
)
def test_settings_that_differ_are_named(other: EngineConfig, name: str) -> None:
    problem = difference(process_facts(CONFIG), [process_facts(other)])
    assert problem is not None
    assert f"{name} is " in problem


def test_processes_say_what_computes_their_models() -> None:
    facts = process_facts(CONFIG)
    assert {"Python", "backend", "version of mlx", "version of mlx-lm"} <= facts.keys()
    assert all("/models" not in value for value in facts.values())


def test_checkpoints_are_compared_by_their_files(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(DEMO_FOLDER, copy)
    facts = checkpoint_facts({"demo": DEMO_FOLDER})
    assert checkpoint_facts({"demo": copy}) == facts
    config = copy / "config.json"
    config.write_text(config.read_text().replace("layers", "layers_"))
    problem = difference(facts, [checkpoint_facts({"demo": copy})])
    assert problem is not None
    assert problem.startswith("Rank 1 differs from rank 0: config of demo.num_hidden_layers is ")
    assert "; files of demo is " in problem
