"""The configuration of an invocation, from flags, environment variables and a file."""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import yaml

from mlx_parallm.cli.former_settings import (
    FOLDED,
    FORMER_SETTINGS,
    RENAMED,
    check_names,
    overridden_by,
    warning_of,
)
from mlx_parallm.cli.kv_peers import checked_peers
from mlx_parallm.cli.replica_peers import check_replicas
from mlx_parallm.cli.setting import DEFAULTS, ENVIRONMENT_PREFIX, GROUPS, Setting, variable_of
from mlx_parallm.cli.setting_values import PerModel, check_owner, owner_names, per_model
from mlx_parallm.cli.settings import SETTINGS
from mlx_parallm.config import NO_KV_DISK, NONE_HERE, EngineConfig, ModelConfig, ModelTask
from mlx_parallm.media_limits import MediaLimits
from mlx_parallm.server_config import KEY_SCOPE, ServerConfig
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.types.json_values import is_mapping

logger = logging.getLogger(__name__)

#: ``MODEL``: the setting of ``MODELS_ARGUMENT``, the positional arguments.
MODEL = "model"
MODELS_ARGUMENT = "models"
#: ``ENGINE_PARTS``: the parts of the configuration that are fields of ``EngineConfig``.
ENGINE_PARTS = (
    "adapters",
    "loading",
    "ranks",
    "cache",
    "memory",
    "kv_peers",
    "encoders",
    "scheduler",
)
#: ``ACCEPTED``: every setting that is read, by its present or a former name.
ACCEPTED = (*SETTINGS, *(former.setting for former in FORMER_SETTINGS))
CONFIG_VARIABLE = ENVIRONMENT_PREFIX + "CONFIG"
ORDER = (
    "Flags override environment variables, which override the file, which overrides the defaults."
)


@dataclass(frozen=True, slots=True)
class SourcedValue:
    """A value from one source, before it is parsed; ``source`` names it in messages."""

    value: Any
    source: str


def add_settings(parser: argparse.ArgumentParser, groups: Sequence[str] = GROUPS) -> None:
    """Add ``--config`` and a flag for each setting of these groups."""
    parser.add_argument(
        "--config", metavar="FILE", help=f"YAML or TOML file of settings (also {CONFIG_VARIABLE})"
    )
    for name in groups:
        group = parser.add_argument_group(name)
        for setting in SETTINGS:
            if setting.group == name:
                flags = [f"--{name}" for name in setting.names]
                flags += [f"-{setting.short}"] if setting.short is not None else []
                group.add_argument(*flags, **_flag_options(setting))
        for former in FORMER_SETTINGS:
            if former.setting.group == name:
                options = _flag_options(former.setting)
                options["help"] = argparse.SUPPRESS
                group.add_argument(f"--{former.name}", **options)
    parser.epilog = f"{ORDER} A setting's variable is {ENVIRONMENT_PREFIX}NAME."


def add_models(parser: argparse.ArgumentParser) -> None:
    """Add models as positional arguments, like vLLM's single one."""
    parser.add_argument(
        MODELS_ARGUMENT,
        nargs="*",
        metavar="ID_OR_FOLDER",
        help="models, as for --model; write them before flags that take several values",
    )


def read_settings(
    args: argparse.Namespace, environment: Mapping[str, str] = os.environ
) -> tuple[EngineConfig, ServerConfig]:
    """Return the configuration of an invocation.

    Raises:
        ConfigError: a value is wrong, a key is unknown, or the file cannot be read.
    """
    sourced_values: dict[str, SourcedValue] = {}
    for values in _sources(args, environment):
        check_names({name: value.source for name, value in values.items()})
        for name in overridden_by(values):
            sourced_values.pop(name, None)
        sourced_values.update(values)
    return build_config({RENAMED.get(name, name): value for name, value in sourced_values.items()})


def _sources(
    args: argparse.Namespace, environment: Mapping[str, str]
) -> list[dict[str, SourcedValue]]:
    """Return what each source gives, by the names that are used there; later ones override."""
    file = getattr(args, "config", None) or environment.get(CONFIG_VARIABLE)
    return [
        from_file(Path(file)) if file else {},
        from_environment(environment),
        from_flags(args),
    ]


def warn_of_former_settings(
    args: argparse.Namespace, environment: Mapping[str, str] = os.environ
) -> None:
    """Log a warning for each setting that goes with the next version, with what replaces it."""
    for values in _sources(args, environment):
        for former in FORMER_SETTINGS:
            if former.name in values:
                logger.warning("%s", warning_of(former, values[former.name].source))


def from_flags(args: argparse.Namespace) -> dict[str, SourcedValue]:
    """Return the settings of flags; models from positional arguments come before --model's."""
    sourced_values = {
        setting.name: SourcedValue(_flag_value(setting, args), f"--{setting.name}")
        for setting in ACCEPTED
        if hasattr(args, _attribute(setting))
    }
    models = getattr(args, MODELS_ARGUMENT, None)
    if models:
        flagged: list[str] = sourced_values[MODEL].value if MODEL in sourced_values else []
        sourced_values[MODEL] = SourcedValue([*models, *flagged], f"--{MODEL}")
    return sourced_values


def _flag_value(setting: Setting, args: argparse.Namespace) -> Any:
    value = getattr(args, _attribute(setting))
    # A flag used once keeps its plain value, so that messages show it unchanged.
    return value[0] if setting.per_model and len(value) == 1 else value


def from_environment(environment: Mapping[str, str]) -> dict[str, SourcedValue]:
    """Return the settings of environment variables; empty ones do not count."""
    return {
        setting.name: SourcedValue(environment[setting.variable], f"variable {setting.variable}")
        for setting in ACCEPTED
        if environment.get(setting.variable)
    }


def warn_of_unknown_variables(environment: Mapping[str, str] = os.environ) -> None:
    """Log variables that have the settings' prefix but name no setting, with suggestions."""
    known = {variable_of(name): entry.variable for entry in SETTINGS for name in entry.names}
    settings = {CONFIG_VARIABLE, *(setting.variable for setting in ACCEPTED)}
    unknown = [
        _with_hint(name, known)
        for name, value in sorted(environment.items())
        if value and name.startswith(ENVIRONMENT_PREFIX) and name not in settings
    ]
    if unknown:
        logger.warning("these environment variables name no setting: %s", ", ".join(unknown))


def _with_hint(name: str, known: Mapping[str, str]) -> str:
    # The comparison leaves the prefix out, because it would make all names similar.
    endings = {name.removeprefix(ENVIRONMENT_PREFIX): own for name, own in known.items()}
    ending = name.removeprefix(ENVIRONMENT_PREFIX).upper()
    closest = difflib.get_close_matches(ending, endings, n=1)
    return f"{name} (did you mean {endings[closest[0]]}?)" if closest else name


def from_file(path: Path) -> dict[str, SourcedValue]:
    """Return the settings of a YAML or TOML file, whose keys may use ``-`` or ``_``.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown or set twice.
    """
    names = {name: setting.name for setting in ACCEPTED for name in setting.names}
    sourced_values: dict[str, SourcedValue] = {}
    unknown: list[str] = []
    for key, value in _load(path).items():
        name = names.get(str(key).replace("_", "-"))
        if name is None:
            unknown.append(str(key))
        elif name in sourced_values:
            raise ConfigError(f"{path}: {name} is set twice")
        else:
            sourced_values[name] = SourcedValue(value, f"{key} in {path}")
    if unknown:
        raise ConfigError(f"{path}: unknown settings: {', '.join(unknown)}")
    return sourced_values


def build_config(sourced_values: Mapping[str, SourcedValue]) -> tuple[EngineConfig, ServerConfig]:
    """Return the configuration: the parsed values, and defaults for all others.

    Raises:
        ConfigError: a value is wrong; the message names the setting and where it was set.
    """
    parts = _parts(sourced_values)
    if "engines" in parts["server"]:
        parts["server"].setdefault("data_parallel_size", NONE_HERE)
    server = ServerConfig(**parts["server"], media=_media(parts["media"]))
    if server.allow_credentials and "*" in server.allowed_origins:
        raise ConfigError("allow-credentials needs named origins, not allowed-origins *")
    if server.cache_scope == KEY_SCOPE and not server.api_keys:
        raise ConfigError(
            "cache-scope key needs api-key: without keys, clients cannot be distinguished"
        )
    # CacheConfig cannot see a limit that was given and is the default.
    if "kv_disk_bytes" in parts["cache"] and "kv_disk" not in parts["cache"]:
        raise ConfigError(NO_KV_DISK)
    kv_cache_dtype: PerModel = parts["cache"].pop("kv_cache_dtype", PerModel())
    if kv_cache_dtype.shared is not None:
        parts["cache"]["kv_cache_dtype"] = kv_cache_dtype.shared
    if parts["loading"].keys() & {"directories", "scans_hub_cache"}:
        # Requests name the models; none needs to be loaded at the start.
        parts["model"].setdefault("paths", ())
    parts["loading"]["model"] = _of_every_model(parts["model"])
    engine = EngineConfig(
        models=_models(parts["model"], kv_cache_dtype),
        **{part: type(DEFAULTS[part])(**parts[part]) for part in ENGINE_PARTS},
        **parts["engine"],
    )
    kv_peers = engine.kv_peers
    asks_for_kv = bool(kv_peers.urls) or kv_peers.prefill_url is not None
    check_replicas(server, asks_for_kv=asks_for_kv)
    return replace(engine, kv_peers=checked_peers(engine, server)), server


def _parts(sourced_values: Mapping[str, SourcedValue]) -> dict[str, dict[str, Any]]:
    """Return the fields that are set, in each part of the configuration."""
    parts: dict[str, dict[str, Any]] = {part: {} for part in DEFAULTS}
    shares: dict[str, Any] = {}
    for setting in (*SETTINGS, *(former.setting for former in FOLDED)):
        if setting.name not in sourced_values:
            continue
        # SETTINGS begins with the models, so their paths are known here.
        paths = parts["model"].get("paths", (None,))
        value = _parse(setting, sourced_values[setting.name], paths)
        shares |= {target: share(value) for target, share in setting.shares}
        if setting.target:
            known, field = parts[setting.part], setting.field
            # Settings of one field, such as keys from a file, add to one another.
            known[field] = known[field] + value if field in known else value
    for target, value in shares.items():
        part, _, field = target.partition(".")
        parts[part].setdefault(field, value)
    return parts


def _media(part: dict[str, Any]) -> MediaLimits:
    """Return the limits on images, with room for the largest ones in the process."""
    limits: MediaLimits = DEFAULTS["media"]
    most, most_bytes = part.get("max_pixels", 0), part.get("max_bytes", 0)
    return replace(
        limits,
        **part,
        max_pixels_in_flight=max(limits.max_pixels_in_flight, most),
        max_fetched_bytes=max(limits.max_fetched_bytes, most_bytes),
    )


def _parse(setting: Setting, sourced_value: SourcedValue, paths: Sequence[str | None]) -> Any:
    try:
        if setting.per_model:
            return per_model(setting.parse, sourced_value.value, paths)
        value = setting.parse(sourced_value.value)
    except ValueError as problem:
        raise ConfigError(
            f"{sourced_value.source}: {problem}, not {sourced_value.value!r}"
        ) from None
    except ConfigError as problem:
        raise ConfigError(f"{sourced_value.source}: {problem}") from None
    return not value if setting.inverted else value


def _models(part: Mapping[str, Any], kv_cache_dtype: PerModel) -> tuple[ModelConfig, ...]:
    options = {name: value for name, value in part.items() if not isinstance(value, PerModel)}
    values = {name: value for name, value in part.items() if isinstance(value, PerModel)}
    lengths = values.get("max_model_len", PerModel())
    paths = options.pop("paths", (None,))
    names = dict(_named(paths, options.pop("names", ())))
    repeated = sorted({path for path in paths if paths.count(path) > 1})
    if repeated:
        raise ConfigError(f"model: given twice: {', '.join(repeated)}")
    tools = _by_model(paths, options.pop("tool_call_parsers", ()), "tool-call-parser")
    reasoning = _by_model(paths, options.pop("reasoning_parsers", ()), "reasoning-parser")
    tasks = _by_model(paths, options.pop("tasks", ()), "task")
    return tuple(
        ModelConfig(
            path=path,
            served_names=tuple(names.get(path, ())),
            tool_call_parser=tools[path],
            reasoning_parser=reasoning[path],
            task=cast("ModelTask", tasks[path]),
            max_model_len_is_own=path in lengths.own,
            kv_cache_dtype=kv_cache_dtype.own.get(path) if path else None,
            **{key: value for key in values if (value := values[key].of(path)) is not None},
            **options,
        )
        for path in paths
    )


def _of_every_model(part: Mapping[str, Any]) -> ModelConfig:
    """Return the settings that hold for models of any name, such as those that are loaded later."""
    names = {each.name for each in fields(ModelConfig)}
    options = {name: value for name, value in part.items() if name in names}
    options = {name: value for name, value in options.items() if not isinstance(value, PerModel)}
    dtype: PerModel = part.get("dtype", PerModel())
    return ModelConfig(**options, **({} if dtype.shared is None else {"dtype": dtype.shared}))


def _by_model(
    paths: Sequence[str | None], values: Sequence[str], setting: str
) -> dict[str | None, str]:
    """Return each model's value: its own, or the value set without a model."""
    bare = [value for value in values if "=" not in value]
    if len(bare) > 1:
        raise ConfigError(f"{setting}: given twice: {', '.join(bare)}")
    chosen: dict[str | None, str] = dict.fromkeys(paths, bare[0] if bare else "auto")
    owners = owner_names(paths)
    try:
        for value in values:
            owner, separator, name = value.rpartition("=")
            if separator:
                check_owner(owner, owners)
                chosen[owners[owner]] = name
    except ConfigError as problem:
        raise ConfigError(f"{setting}: {problem}") from None
    return chosen


def _named(
    paths: Sequence[str | None], names: Sequence[str]
) -> Iterator[tuple[str | None, Sequence[str]]]:
    """Yield each model with its names; a bare name is possible while there is one model."""
    by_path: dict[str | None, list[str]] = {path: [] for path in paths}
    owners = owner_names(paths)
    for name in names:
        owner, separator, alias = name.rpartition("=")
        if separator and alias and owner in owners:
            by_path[owners[owner]].append(alias)
        elif len(by_path) == 1:
            by_path[paths[0]].append(name)
        else:
            raise ConfigError(
                f"served-model-name: with several models write MODEL=NAME, not {name!r}"
            )
    yield from by_path.items()


def _load(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except OSError as problem:
        raise ConfigError(f"{path}: {problem.strerror}") from None
    except (tomllib.TOMLDecodeError, yaml.YAMLError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{path}: {problem}") from None
    if content is None:
        return {}
    if not is_mapping(content):
        raise ConfigError(f"{path}: must be a table of settings")
    return content


def _attribute(setting: Setting) -> str:
    return "setting_" + setting.name.replace("-", "_")


def _flag_options(setting: Setting) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` for a setting."""
    options: dict[str, Any] = {
        "dest": _attribute(setting),
        "default": argparse.SUPPRESS,
        "help": _help(setting),
    }
    if setting.is_switch:
        options["action"] = argparse.BooleanOptionalAction
    else:
        options["metavar"] = setting.metavar or setting.name.rpartition("-")[2].upper()
    if setting.is_list:
        options |= {"action": "extend", "nargs": "+"}
    elif setting.per_model:
        # The flag takes one value at a time, because the next argument may be a model.
        options["action"] = "append"
    return options


def _help(setting: Setting) -> str:
    if setting.is_switch:
        shown = "on" if setting.default else "off"
    elif setting.default in (None, (), ""):
        return setting.help.replace("%", "%%")
    else:
        shown = " ".join(setting.default) if setting.is_list else str(setting.default)
    return f"{setting.help} (default: {shown})".replace("%", "%%")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the models and flags of ``mlx_parallm serve``."""
    parser.usage = "%(prog)s [ID_OR_FOLDER ...] [FLAGS]"
    add_models(parser)
    add_settings(parser)
