"""Reports on the ranks of a launch, and measures the links between them, without a model."""

from __future__ import annotations

import os
import socket
import statistics
import time
from dataclasses import asdict, dataclass

from mlx_parallm.config import EngineConfig
from mlx_parallm.distributed.agreement import difference
from mlx_parallm.distributed.facts import process_facts
from mlx_parallm.distributed.join_watch import joining_within
from mlx_parallm.distributed.leading import end_process
from mlx_parallm.distributed.link import LINK_SHARE, FollowerLink, LeaderLink
from mlx_parallm.distributed.watch import Watch
from mlx_parallm.worker.device.properties import device_report
from mlx_parallm.worker.device.ranks import Ranks, join_ranks
from mlx_parallm.worker.timing.ranks import Sums, measure_sums

# INTRODUCE, ECHO, MEASURE: the kinds of rank 0's messages.
INTRODUCE, ECHO, MEASURE = 1, 2, 3
# INTRODUCE_S: seconds in which a rank describes its machine.
INTRODUCE_S = 25.0
# NUM_ECHOES: repetitions of the measurement of the log; the median counts.
NUM_ECHOES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDescription:
    """Facts about the machine of a rank.

    Attributes:
        host: the name of the machine.
        device: its processor or GPU.
        memory_free_bytes: bytes that a model may take; None if unknown.
        facts: what all ranks must have alike.
    """

    host: str
    device: str
    memory_free_bytes: int | None
    facts: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldReport:
    """All ranks of a launch.

    Attributes:
        backend: the name of MLX's backend.
        ranks: all ranks, rank 0 first.
        log_us: time until rank 0 has the answers of all ranks to a message of the log.
        sums: the measured sums.
        difference: what ranks have otherwise than rank 0, for which a server would refuse them.
    """

    backend: str
    ranks: tuple[RankDescription, ...]
    log_us: float
    sums: Sums
    difference: str | None


def report_world(config: EngineConfig) -> WorldReport | None:
    """Return a report on all ranks, which call this together; None on ranks above 0.

    The process ends by ``end_process`` if another rank is lost.

    Raises:
        ConfigError: a rank is missing, or cannot reach rank 0.
    """
    settings = config.ranks
    join_s = settings.join_timeout_s
    with joining_within(join_s, os.environ):
        ranks = join_ranks(settings.backend)
        link = (
            LeaderLink.open(ranks, settings.host, LINK_SHARE * join_s)
            if ranks.rank == 0
            else FollowerLink.open(ranks, LINK_SHARE * join_s)
        )
    own = describe(config)
    if isinstance(link, LeaderLink):
        return lead(ranks, own, link, Watch(0, link.beats, settings.timeout_s, end_process))
    ends = {0: link.beats}
    follow(ranks, own, link, Watch(ranks.rank, ends, settings.timeout_s, end_process))
    return None


def describe(config: EngineConfig) -> RankDescription:
    """Return the facts about this process."""
    device = device_report()
    return RankDescription(
        host=socket.gethostname(),
        device=f"{device.device} ({device.backend})",
        memory_free_bytes=device.memory_free_bytes,
        facts=process_facts(config),
    )


def lead(ranks: Ranks, own: RankDescription, link: LeaderLink, watch: Watch) -> WorldReport:
    """Question the followers, and measure with them."""
    watch.start()
    described = [
        RankDescription(**other) for other in link.replies(link.send(INTRODUCE, None), INTRODUCE_S)
    ]
    log_us = statistics.median(_echo_s(link) for _ in range(NUM_ECHOES)) * 1e6
    link.send(MEASURE, None)
    sums = measure_sums(ranks)
    watch.stop()
    link.close()
    watch.close()
    return WorldReport(
        backend=ranks.backend,
        ranks=(own, *described),
        log_us=log_us,
        sums=sums,
        difference=difference(own.facts, [each.facts for each in described]),
    )


def follow(ranks: Ranks, own: RankDescription, link: FollowerLink, watch: Watch) -> None:
    """Answer rank 0, and measure with it, until its goodbye."""
    watch.start()
    while (message := link.receive()) is not None:
        if message.kind == MEASURE:
            measure_sums(ranks)
        else:
            link.reply(message.number, asdict(own) if message.kind == INTRODUCE else None)
    watch.close()
    link.close()


def _echo_s(link: LeaderLink) -> float:
    """Return the time until all followers have answered."""
    began = time.perf_counter()
    link.replies(link.send(ECHO, None))
    return time.perf_counter() - began
