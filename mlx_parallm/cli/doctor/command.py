"""The flags, the output and the exit status of ``mlx_parallm doctor``."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict

from mlx_parallm.cli.configure import add_settings, read_settings
from mlx_parallm.cli.doctor.diagnosis import Diagnosis, diagnose
from mlx_parallm.cli.doctor.text import render
from mlx_parallm.cli.ranks import with_ranks
from mlx_parallm.cli.setting import BATCHING, MEMORY, MODELS

#: ``SETTING_GROUPS``: the settings that decide a server's models and their KV.
SETTING_GROUPS = (MODELS, MEMORY, BATCHING)
#: ``FAILED``: exit status if a server would not start, or would compute wrongly.
FAILED = 1
#: ``REJECTED``: exit status if a server would run, without kernels that this device should have.
REJECTED = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``mlx_parallm doctor``."""
    parser.add_argument("--json", action="store_true", help="print JSON, for issue reports")
    parser.add_argument(
        "--engines",
        action="store_true",
        help="measure how many engines of the first model pay on this machine (see "
        "--data-parallel-size of serve), and report only that",
    )
    add_settings(parser, SETTING_GROUPS)


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis and return its ``exit_status``; ranks above 0 print nothing."""
    engine_config, server_config = read_settings(args)
    if args.engines:
        # The import is here, so that the rest of the report works even if this fails.
        from mlx_parallm.cli import engine_counts  # noqa: PLC0415

        return engine_counts.run(engine_config, server_config, as_json=args.json)
    engine_config = with_ranks(engine_config, server_config, os.environ)
    world = None
    if engine_config.ranks.size > 1:
        # A process that is alone does not import what several need.
        from mlx_parallm.distributed.diagnosis import report_world  # noqa: PLC0415

        world = report_world(engine_config)
    if engine_config.ranks.rank > 0:
        return 0
    diagnosis = diagnose(engine_config, world)
    if args.json:
        print(json.dumps(asdict(diagnosis), indent=2))
    else:
        print("\n".join(render(diagnosis)))
    return exit_status(diagnosis)


def exit_status(diagnosis: Diagnosis) -> int:
    """Return ``FAILED`` or ``REJECTED``, or 0 if a server would run as fast as it can."""
    attention = (diagnosis.attention, *diagnosis.quantised_kv.values())
    differs = diagnosis.world is not None and diagnosis.world.difference is not None
    serves = diagnosis.kv_problem is None and not differs
    serves &= diagnosis.kv_folder is None or diagnosis.kv_folder.refused is None
    serves &= diagnosis.speed is None or diagnosis.speed.problem is None
    if not serves or not all(each.passed for each in attention):
        return FAILED
    return REJECTED if diagnosis.rejected else 0
