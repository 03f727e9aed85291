"""A rank counts as lost if it is silent, or if no rank makes progress with ops it should end."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from mlx_parallm.distributed.pulses import NUM_OPS, Beat, Pulses, RankReport

TIMEOUT_S = 60.0
LONG_S = 600.0


@dataclass
class Group:
    """The pulses as one rank knows them, and a clock that a test sets."""

    rank: int = 0
    others: tuple[int, ...] = (1,)
    now: float = 1000.0
    pulses: Pulses = field(init=False)

    def __post_init__(self) -> None:
        self.pulses = Pulses(self.rank, self.others, TIMEOUT_S, lambda: self.now)

    def pass_s(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds

    def beat(self, num_begun: int, num_ended: int, age_s: float = 0.0, rank: int = 1) -> None:
        """Let a beat of another rank come."""
        self.pulses.hear(rank, Beat(num_begun, num_ended, age_s))

    def beat_for(self, seconds: int, num_begun: int, num_ended: int) -> None:
        """Let the same beat of rank 1 come every second."""
        for _ in range(seconds):
            self.pass_s(1)
            self.beat(num_begun, num_ended)

    def begin(self, *limits: float | None) -> None:
        """Begin ops of these limits."""
        for limit_s in limits:
            self.pulses.ops.begin(limit_s)


@pytest.fixture
def group() -> Group:
    return Group()


def test_an_idle_group_stays_whole(group: Group) -> None:
    group.beat_for(600, 0, 0)
    assert group.pulses.judge() is None


@pytest.mark.parametrize("rank", [0, 1])
def test_a_silent_rank_is_lost(rank: int) -> None:
    other = 1 - rank
    group = Group(rank, (other,))
    group.pass_s(TIMEOUT_S)
    assert group.pulses.judge() is None
    group.pass_s(0.5)
    assert group.pulses.judge() == f"rank {other} has been silent for 60.5 s"


def test_silence_counts_from_the_start(group: Group) -> None:
    group.pass_s(3600)
    group.pulses.start()
    assert group.pulses.judge() is None


def test_beats_without_progress_are_a_loss(group: Group) -> None:
    group.begin(None)
    group.pulses.ops.end()
    group.beat_for(60, 1, 0)
    group.beat_for(1, 1, 0)
    assert group.pulses.judge() is None
    group.beat_for(1, 1, 0)
    assert group.pulses.judge() == "rank 1 has made no progress for 61.0 s"


def test_a_rank_that_never_began_is_named() -> None:
    group = Group(others=(1, 2))
    group.begin(None)
    group.pulses.ops.end()
    group.beat(1, 1, rank=1)
    group.pass_s(59)
    group.beat(1, 1, rank=1)
    group.beat(0, 0, rank=2)
    group.pass_s(2)
    assert group.pulses.judge() == "rank 2 has made no progress for 61.0 s"


def test_ranks_that_wait_for_each_other_are_named(group: Group) -> None:
    group.begin(None)
    group.pass_s(1)
    group.beat(1, 0)
    group.beat_for(61, 1, 0)
    assert group.pulses.judge() == "ranks 0, 1 have made no progress for 61.0 s"


def test_every_progress_counts(group: Group) -> None:
    group.begin(*[None] * 4)
    for num_ended in range(4):
        group.beat_for(45, num_ended + 1, num_ended)
        group.pulses.ops.end()
        assert group.pulses.judge() is None


def test_the_op_of_rank_0_counts_if_all_others_have_ended_theirs(group: Group) -> None:
    group.begin(None)
    group.beat_for(62, 1, 1)
    assert group.pulses.judge() == "rank 0 has made no progress for 61.0 s"
    group.pulses.ops.end()
    assert group.pulses.judge() is None


def test_followers_judge_no_ops() -> None:
    # They know neither the ops of rank 0 nor how far the others are.
    group = Group(rank=1, others=(0,))
    group.begin(None)
    for _ in range(600):
        group.pass_s(1)
        group.beat(9, 3, rank=0)
    assert group.pulses.judge() is None


def test_long_ops_get_longer(group: Group) -> None:
    group.begin(LONG_S)
    group.beat_for(601, 1, 0)
    assert group.pulses.judge() is None
    group.beat_for(1, 1, 0)
    assert group.pulses.judge() == "ranks 0, 1 have made no progress for 601.0 s"


def test_a_rank_that_is_slower_with_a_long_op_gets_as_long(group: Group) -> None:
    group.begin(LONG_S)
    group.pulses.ops.end()
    # Rank 0 is in a step, which waits for that rank.
    group.begin(None)
    group.beat_for(500, 1, 0)
    assert group.pulses.judge() is None
    group.beat_for(60, 2, 1)
    assert group.pulses.judge() is None
    group.beat_for(2, 2, 1)
    assert group.pulses.judge() == "ranks 0, 1 have made no progress for 61.0 s"


def test_a_long_op_is_no_excuse_for_steps_that_follow(group: Group) -> None:
    # Steps run one ahead, so that there never is a time without an op.
    group.begin(None, LONG_S)
    for number in range(2, 6):
        group.pulses.ops.end()
        group.begin(None)
        group.pass_s(1)
        group.beat(number, number - 1)
    group.beat_for(61, 5, 4)
    assert group.pulses.judge() == "ranks 0, 1 have made no progress for 61.0 s"


def test_the_limit_is_at_least_the_timeout(group: Group) -> None:
    group.begin(1.0)
    group.beat_for(60, 1, 0)
    assert group.pulses.judge() is None


def test_a_rank_that_is_very_far_behind_is_lost(group: Group) -> None:
    for _ in range(NUM_OPS + 9):
        group.begin(None)
        group.pulses.ops.end()
    group.beat_for(62, 1, 0)
    assert group.pulses.judge() == "rank 1 has made no progress for 61.0 s"


def test_the_skew_is_that_of_the_slowest_rank() -> None:
    group = Group(others=(1, 2))
    group.begin(None)
    group.pass_s(0.5)
    # They began their op 0.3 s and 0.1 s ago.
    group.beat(1, 0, 0.3, rank=1)
    group.beat(1, 1, 0.1, rank=2)
    assert group.pulses.skew_s() == pytest.approx(0.4)
    group.pass_s(2.0)
    group.beat(1, 1, 2.3, rank=1)
    group.beat(1, 1, 2.1, rank=2)
    assert group.pulses.skew_s() == pytest.approx(0.4)
    group.begin(None)
    group.pass_s(0.2)
    group.beat(2, 1, 0.2, rank=2)
    assert group.pulses.skew_s() == pytest.approx(0.2)


def test_the_skew_of_one_op_is_not_compared_with_another(group: Group) -> None:
    group.begin(None)
    group.pass_s(5.0)
    group.begin(None)
    group.beat(1, 0, 4.9)
    assert group.pulses.skew_s() == pytest.approx(0.1)


def test_reports_and_beats_say_how_far_a_rank_is(group: Group) -> None:
    assert group.pulses.ops.beat() == Beat(0, 0, 0.0)
    group.begin(None, None)
    group.pass_s(2.0)
    group.pulses.ops.end()
    assert group.pulses.ops.beat() == Beat(2, 1, 2.0)
    group.beat(2, 1)
    group.pass_s(0.5)
    assert group.pulses.report() == {1: RankReport(age_s=0.5, num_begun=2, num_ended=1)}
