"""The process of a rank above 0, which serves no clients and follows rank 0."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from mlx_parallm.config import EngineConfig
from mlx_parallm.distributed.agreement import answer
from mlx_parallm.distributed.facts import checkpoint_facts, process_facts
from mlx_parallm.distributed.follower import Follower
from mlx_parallm.distributed.join_watch import joining_within
from mlx_parallm.distributed.leading import end_process
from mlx_parallm.distributed.link import LINK_SHARE, FollowerLink
from mlx_parallm.distributed.watch import Watch
from mlx_parallm.process_setup.garbage import spare_garbage_collection
from mlx_parallm.types.errors import RankLostError
from mlx_parallm.worker.device.ranks import join_ranks
from mlx_parallm.worker.ops import Load
from mlx_parallm.worker.worker import Worker

logger = logging.getLogger(__name__)


def follow(
    config: EngineConfig,
    install: Callable[[Worker], None],
    find_folders: Callable[[EngineConfig], Mapping[str, Path]],
) -> None:
    """Apply what rank 0 decides until it says goodbye.

    The process ends by ``end_process`` if rank 0 or this rank fails.

    Args:
        config: the settings, which must be those of rank 0.
        install: gives a worker the loaders of models.
        find_folders: see ``leading_worker``.

    Raises:
        ConfigError: this rank differs from rank 0.
    """
    settings = config.ranks
    join_s = settings.join_timeout_s
    with joining_within(join_s, os.environ):
        ranks = join_ranks(settings.backend)
        link = FollowerLink.open(ranks, LINK_SHARE * join_s)
    watch = Watch(ranks.rank, {0: link.beats}, settings.timeout_s, end_process)
    answer(link, process_facts(config), watch.stop)
    watch.start()
    folders = find_folders(config)
    answer(link, checkpoint_facts(folders), watch.stop)
    logger.info("rank %d of %d follows by %s", ranks.rank, ranks.size, ranks.backend)
    worker = Worker(ranks=ranks)
    install(worker)
    # A pause of one rank is a pause of all.
    spare_garbage_collection()
    try:
        Follower(ranks, link, watch, worker, lambda op: _localised(op, folders)).run()
    except RankLostError as problem:
        end_process(str(problem))
    except Exception as problem:
        logger.exception("an op failed")
        end_process(f"an op failed on rank {ranks.rank}: {type(problem).__name__}: {problem}")
    watch.close()
    link.close()


def _localised(op: Load, folders: Mapping[str, Path]) -> Load:
    """Return a load with the folder that the model has on this machine."""
    return replace(op, spec=replace(op.spec, path=folders.get(op.model, op.spec.path)))
