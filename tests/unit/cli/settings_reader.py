"""The settings that flags and variables give, as commands read them."""

from __future__ import annotations

import argparse

from mlx_parallm.cli.configure import add_models, add_settings, read_settings
from mlx_parallm.cli.parser import CommandParser
from mlx_parallm.config import EngineConfig
from mlx_parallm.server_config import ServerConfig


def read(*flags: str, **environment: str) -> tuple[EngineConfig, ServerConfig]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_settings(parser)
    return read_settings(parser.parse_args(flags), environment)


def read_serve(*arguments: str) -> tuple[EngineConfig, ServerConfig]:
    parser = CommandParser(prog="serve")
    add_models(parser)
    add_settings(parser)
    return read_settings(parser.parse_args(arguments), {})
