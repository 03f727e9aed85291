"""The command ``mlx_parallm batch in.jsonl out.jsonl``, which needs no server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mlx_parallm.api.app import create_app
from mlx_parallm.batch_jobs.lines import numbered_lines
from mlx_parallm.cli.batch_file import BatchCounts, run_batch_file
from mlx_parallm.cli.configure import (
    add_settings,
    read_settings,
    warn_of_former_settings,
    warn_of_unknown_variables,
)
from mlx_parallm.cli.engines import open_engine, progress_shown, with_engine_count
from mlx_parallm.cli.logs import configure_logging
from mlx_parallm.cli.setting import BATCHING, MEMORY, MODELS, PROCESS, REQUESTS
from mlx_parallm.config import EngineConfig
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``mlx_parallm batch``."""
    parser.add_argument("input", type=Path, help="JSON lines in the form of OpenAI's Batch API")
    parser.add_argument("output", type=Path, help="file for the answers; overwritten if it exists")
    parser.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help="lines in flight at once (default: twice --max-num-seqs for each engine)",
    )
    add_settings(parser, (MODELS, MEMORY, BATCHING, REQUESTS, PROCESS))


def run(args: argparse.Namespace) -> int:
    """Answer the file; return 1 if a line was not answered with status 200, else 0."""
    engine_config, server_config = read_settings(args)
    server_config = with_engine_count(server_config)
    configure_logging(
        "warning" if server_config.log_level == "info" else server_config.log_level,
        server_config.log_format,
    )
    warn_of_unknown_variables()
    warn_of_former_settings(args)
    if args.concurrency is not None and args.concurrency < 1:
        raise ConfigError(f"--concurrency: must be at least 1, not {args.concurrency}")
    most = server_config.data_parallel_size * engine_config.scheduler.max_num_seqs
    concurrency = args.concurrency or 2 * most
    try:
        total = count_lines(args.input)
        _check_output(args.input, args.output)
        counts = answer_file(
            engine_config, server_config, args.input, args.output, total, concurrency
        )
    except OSError as problem:
        path = problem.filename or args.output
        raise ConfigError(f"{path}: {problem.strerror}") from None
    print(f"{counts.total} lines answered, {counts.failed} failed", file=sys.stderr)
    return int(counts.failed > 0)


def count_lines(source: Path) -> int | None:
    """Return the number of lines to answer; None if the source can be read only once."""
    if source.is_fifo() or source.is_char_device():
        return None
    return sum(1 for _ in numbered_lines(source))


def answer_file(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    source: Path,
    target: Path,
    total: int | None,
    concurrency: int,
) -> BatchCounts:
    """Load the models and answer every line; ``total`` is for the progress bar, if known."""
    engine = open_engine(engine_config, server_config)
    engine.start()
    try:
        with progress(total) as on_answer:
            return asyncio.run(
                run_batch_file(
                    create_app(
                        engine, server_config, max_waiting=engine_config.scheduler.max_waiting
                    ),
                    source,
                    target,
                    api_key=next(iter(server_config.api_keys), None),
                    concurrency=concurrency,
                    on_answer=on_answer,
                )
            )
    finally:
        engine.stop()


def _check_output(source: Path, target: Path) -> None:
    """Check that ``target`` can be written, before the models are loaded."""
    if target.exists() and target.samefile(source):
        raise ConfigError(f"{target}: the answers would overwrite the questions.")
    with target.open("a", encoding="utf-8"):
        pass


@contextlib.contextmanager
def progress(total: int | None) -> Generator[Callable[[], None]]:
    """Give what is called for each answer: a bar on a terminal, and a few lines elsewhere."""
    bar: tqdm[Any]
    with tqdm(total=total, unit="line", file=sys.stderr, disable=None) as bar:
        show, count = progress_shown(), itertools.count(1)

        def advance() -> None:
            bar.update()
            if bar.disable and total:
                show(f"{total} lines", next(count) / total)

        yield advance
