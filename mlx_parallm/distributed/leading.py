"""Opens the worker of rank 0: joins the other ranks, and compares what all must have alike."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from mlx_parallm.config import EngineConfig
from mlx_parallm.distributed.agreement import agree
from mlx_parallm.distributed.facts import checkpoint_facts, process_facts
from mlx_parallm.distributed.join_watch import joining_within
from mlx_parallm.distributed.leader import LeadingWorker
from mlx_parallm.distributed.link import LINK_SHARE, LeaderLink
from mlx_parallm.distributed.log import LeaderLog
from mlx_parallm.distributed.metrics import RankMetrics
from mlx_parallm.distributed.watch import Watch
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.worker.device.ranks import join_ranks
from mlx_parallm.worker.generation.load.plan import GenerationSpec
from mlx_parallm.worker.worker import Worker

logger = logging.getLogger(__name__)

#: ``LOST``: the exit status of a rank that ends because another one is lost (EX_TEMPFAIL of BSD's
#: sysexits.h).
LOST = 75
# LOG_S: seconds that a rank which ends may take to log why.
LOG_S = 1.0
# FETCH_S: seconds that ranks may take to fetch the files of models.
FETCH_S = 24 * 3600.0


def end_process(reason: str) -> None:
    """Log why a rank ends, and end it at once.

    Native code that waits for a lost rank cannot be interrupted, so nothing is cleaned up. A log
    that nobody reads blocks its writers, so another thread ends the process if that happens.
    """
    end = threading.Timer(LOG_S, os._exit, (LOST,))
    end.daemon = True
    # There may be no memory for a thread.
    with suppress(RuntimeError):
        end.start()
    logger.critical("this rank ends: %s", reason)
    for handler in logging.getLogger().handlers:
        handler.flush()
    os._exit(LOST)


@contextmanager
def leading_worker(
    config: EngineConfig,
    families: MetricFamilies,
    find_folders: Callable[[EngineConfig], Mapping[str, Path]],
) -> Generator[Worker]:
    """Return rank 0's worker, which all other ranks follow while the block runs.

    Args:
        config: the settings.
        families: get the metrics of the ranks.
        find_folders: returns the folders of the models that all ranks compute, by name; it
            fetches what is missing.

    Raises:
        ConfigError: a rank is missing, or differs.
    """
    settings = config.ranks
    join_s = settings.join_timeout_s
    with joining_within(join_s, os.environ):
        ranks = join_ranks(settings.backend)
        link = LeaderLink.open(ranks, settings.host, LINK_SHARE * join_s)
    watch = Watch(0, link.beats, settings.timeout_s, end_process)
    try:
        agree(link, process_facts(config), join_s, watch.stop)
        watch.start()
        agree(link, checkpoint_facts(find_folders(config)), FETCH_S, watch.stop)
        families.of(RankMetrics).watch(watch, link)
        logger.info("rank 0 of %d leads by %s", ranks.size, ranks.backend)
        log = LeaderLog(link, watch, end_process)
        yield LeadingWorker(ranks, log, (GenerationSpec,))
    except BaseException:
        watch.close()
        link.close(goodbye=False)
        raise
    watch.stop()
    link.close()
    watch.close()
