"""Definition of a setting: a flag, an environment variable and a key of a file for one field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlx_parallm.cli import setting_values as values
from mlx_parallm.cli.setting_values import Parse
from mlx_parallm.config import (
    AdapterConfig,
    CacheConfig,
    EncoderConfig,
    EngineConfig,
    KVPeersConfig,
    LoadingConfig,
    MemoryConfig,
    ModelConfig,
    RanksConfig,
    SchedulerConfig,
)
from mlx_parallm.media_limits import MediaLimits
from mlx_parallm.server_config import ServerConfig

ENVIRONMENT_PREFIX = "MLX_PARALLM_"

MODELS = "models"
ADAPTERS = "adapters"
MEMORY = "memory and prefix cache"
BATCHING = "batching and queue"
ADDRESS = "address and access"
REQUESTS = "requests and streams"
STORAGE = "files and batches"
PROCESS = "process and logs"
GROUPS = (MODELS, ADAPTERS, MEMORY, BATCHING, ADDRESS, REQUESTS, STORAGE, PROCESS)


def variable_of(name: str) -> str:
    """Return the environment variable for a flag's name."""
    return ENVIRONMENT_PREFIX + name.upper().replace("-", "_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting.

    Attributes:
        name: the flag without its dashes, and the key in a file.
        target: ``part.field`` of the configuration; parts are model, adapters, loading, cache,
            kv_peers, scheduler, encoders, engine, server and media. Empty: only ``shares`` has
            fields.
        parse: returns the field's value for a text or a file's value.
        group: its heading in ``--help``.
        help: a description.
        aliases: other names of the flag and the file key.
        short: a name of the flag after a single dash.
        metavar: the name of its value in ``--help``.
        inverted: True for a switch whose flag means the opposite of its field.
        per_model: True if MODEL=VALUE sets it for one of several models.
        shares: further fields that its value sets, each by a function of it.
    """

    name: str
    target: str
    parse: Parse
    group: str
    help: str
    aliases: tuple[str, ...] = ()
    short: str | None = None
    metavar: str | None = None
    inverted: bool = False
    per_model: bool = False
    shares: tuple[tuple[str, Callable[[Any], Any]], ...] = ()

    @property
    def part(self) -> str:
        """The part of the configuration that has its field."""
        return self.target.partition(".")[0]

    @property
    def field(self) -> str:
        """The field's name in that part."""
        return self.target.partition(".")[2]

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return variable_of(self.name)

    @property
    def names(self) -> tuple[str, ...]:
        """Its name and its aliases."""
        return (self.name, *self.aliases)

    @property
    def is_switch(self) -> bool:
        """True if the flag takes no value."""
        return self.parse is values.boolean

    @property
    def is_list(self) -> bool:
        """True if the flag takes several values and may be repeated."""
        lists = (values.listed, values.tasks, values.hosts)
        return self.parse in lists or self.field.endswith("_parsers")

    @property
    def default(self) -> Any:
        """The default value of the setting, which for inverted switches is not the field's."""
        if not self.target:
            return None
        value = getattr(DEFAULTS[self.part], self.field, ())
        return not value if self.inverted else value


DEFAULTS: dict[str, Any] = {
    "model": ModelConfig(),
    "cache": CacheConfig(),
    "memory": MemoryConfig(),
    "kv_peers": KVPeersConfig(),
    "scheduler": SchedulerConfig(),
    "adapters": AdapterConfig(),
    "encoders": EncoderConfig(),
    "loading": LoadingConfig(),
    "ranks": RanksConfig(),
    "engine": EngineConfig(),
    "server": ServerConfig(),
    "media": MediaLimits(),
}
