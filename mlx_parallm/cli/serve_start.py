"""The beginning of ``mlx_parallm serve``: what can be refused before the server's modules load.

Those take seconds. A wrong path, a port in use and an impossible setting are reported before.
"""

from __future__ import annotations

import argparse
import importlib
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mlx_parallm.api.http.listener import bind_all, inherit
from mlx_parallm.cli.configure import (
    read_settings,
    warn_of_former_settings,
    warn_of_unknown_variables,
)
from mlx_parallm.cli.logs import configure_logging
from mlx_parallm.cli.ranks import LAUNCHER, is_open_pipe, with_ranks
from mlx_parallm.config import EngineConfig
from mlx_parallm.confinement import check_folder
from mlx_parallm.generation.kv_cache.disk.folder import check_kv_folder
from mlx_parallm.models.gguf.files import check_model
from mlx_parallm.server_config import ServerConfig

SERVER = "mlx_parallm.cli.serve"


def run(args: argparse.Namespace) -> int:
    """Serve with the settings of arguments, environment and file; return the exit status.

    Raises:
        ConfigError: a setting is wrong, or the address cannot be used.
        ModelLoadError: a folder of a model is not there.
    """
    engine_config, server_config = read_settings(args)
    if server_config.data_dir is None:
        server_config = replace(server_config, data_dir=default_data_dir(os.environ, sys.platform))
    configure_logging(server_config.log_level, server_config.log_format)
    warn_of_unknown_variables()
    warn_of_former_settings(args)
    check_folders(engine_config)
    engine_config = with_ranks(engine_config, server_config, os.environ)
    # This is asked before the models load: a launcher that ends meanwhile must be noticed.
    has_launcher = engine_config.ranks.size > 1 and is_open_pipe(LAUNCHER)
    if engine_config.ranks.rank > 0:
        return importlib.import_module(SERVER).follow(engine_config)
    listeners = open_listeners(server_config)
    return importlib.import_module(SERVER).serve(
        engine_config, server_config, listeners, has_launcher=has_launcher
    )


def check_folders(config: EngineConfig) -> None:
    """Check the folders and files of models, and create the folder of ``--kv-disk``.

    Raises:
        ModelLoadError: a model is to come from a folder that is not there, or from a damaged file.
        ConfigError: KV cannot be kept in the folder of ``--kv-disk``.
    """
    if config.cache.kv_disk is not None:
        check_kv_folder(config.cache.kv_disk)
    paths = [model.path for model in config.models]
    if config.speculative is not None:
        paths.append(config.speculative.model)
    for path in filter(None, paths):
        folder = check_folder(path)
        if folder is not None and folder.is_file():
            check_model(folder)


def default_data_dir(environment: Mapping[str, str], platform: str) -> str:
    """Return the user's data folder for this program (XDG Base Directory; Apple's guidelines)."""
    if platform == "darwin":
        return str(Path.home() / "Library" / "Application Support" / "mlx_parallm")
    data = environment.get("XDG_DATA_HOME", "")
    # The XDG specification says to ignore relative paths.
    home = Path(data) if data.startswith("/") else Path.home() / ".local" / "share"
    return str(home / "mlx_parallm")


def open_listeners(config: ServerConfig) -> list[socket.socket]:
    """Return the bound sockets to serve on; raise ConfigError if they cannot be had."""
    if config.fd is not None:
        return [inherit(config.fd)]
    return bind_all(config.host, config.port)
