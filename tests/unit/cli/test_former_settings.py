"""Former settings are read for one more version, and say what replaces them."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.cli.configure import add_settings, read_settings, warn_of_former_settings
from mlx_parallm.cli.former_settings import FOLDED, FORMER_SETTINGS, RENAMED, FormerSetting
from mlx_parallm.cli.parser import CommandParser
from mlx_parallm.cli.settings import SETTINGS
from mlx_parallm.config import EngineConfig
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.errors import ConfigError

#: A value of every former setting, which no default is.
VALUE = "77"
Configuration = tuple[EngineConfig, ServerConfig]


def parser() -> CommandParser:
    parser = CommandParser()
    add_settings(parser)
    return parser


def read(*flags: str, **environment: str) -> Configuration:
    return read_settings(parser().parse_args(flags), environment)


def value_at(target: str, configuration: Configuration) -> Any:
    engine, server = configuration
    part, _, field = target.partition(".")
    parts = {
        "server": server,
        "media": server.media,
        "encoders": engine.encoders,
        "loading": engine.loading,
    }
    return getattr(parts[part], field)


def sources_of(former: FormerSetting, tmp_path: Path) -> dict[str, argparse.Namespace | str]:
    """Return the arguments, or the variable, that give a former setting, by their name."""
    name = former.name
    files = {name: tmp_path / "a.yaml", name.replace("-", "_"): tmp_path / "b.yaml"}
    for key, file in files.items():
        file.write_text(f"{key}: {VALUE}")
    return {
        f"--{name}": parser().parse_args([f"--{name}", VALUE]),
        f"variable {former.setting.variable}": former.setting.variable,
        **{
            f"{key} in {file}": parser().parse_args(["--config", str(file)])
            for key, file in files.items()
        },
    }


@pytest.mark.parametrize("former", FORMER_SETTINGS, ids=lambda former: former.name)
def test_every_former_setting_is_read_as_before_with_a_warning(
    former: FormerSetting, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for source, args_or_variable in sources_of(former, tmp_path).items():
        args, environment = parser().parse_args([]), dict[str, str]()
        if isinstance(args_or_variable, str):
            environment = {args_or_variable: VALUE}
        else:
            args = args_or_variable
        configuration = read_settings(args, environment)
        assert value_at(former.setting.target, configuration) == int(VALUE)
        caplog.clear()
        warn_of_former_settings(args, environment)
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert record.getMessage() == (
            f"{source} goes with the next version, and is read as before until then; use "
            f"{former.advice}"
        )


@pytest.mark.parametrize("name", RENAMED)
def test_a_former_name_is_the_present_setting(name: str) -> None:
    assert read(f"--{name}", VALUE) == read(f"--{RENAMED[name]}", VALUE) != read()


@pytest.mark.parametrize("former", FOLDED, ids=lambda former: former.name)
def test_a_folded_setting_changes_its_own_field_only(former: FormerSetting) -> None:
    engine, server = read(f"--{former.name}", VALUE)
    changed = str((engine, server))
    own = f"{former.setting.field}={value_at(former.setting.target, (engine, server))!r}"
    before = f"{former.setting.field}={value_at(former.setting.target, read())!r}"
    # The name of a field may end another's: what precedes it is an opening bracket or a space.
    for opening in "( ":
        changed = changed.replace(f"{opening}{own}", f"{opening}{before}")
    assert changed == str(read())


@pytest.mark.parametrize("former", FORMER_SETTINGS, ids=lambda former: former.name)
def test_a_former_setting_beside_its_replacement_is_refused(
    former: FormerSetting, tmp_path: Path
) -> None:
    if former.new is None:
        return
    (new,) = (setting for setting in SETTINGS if setting.name == former.new)
    file = tmp_path / "settings.yaml"
    file.write_text(f"{former.name}: 77\n{new.name}: 78\n")
    for flags, environment, sources in (
        (
            [f"--{former.name}", "77", f"--{new.name}", "78"],
            {},
            (f"--{former.name}", f"--{new.name}"),
        ),
        (
            [],
            {former.setting.variable: "77", new.variable: "78"},
            (f"variable {former.setting.variable}", f"variable {new.variable}"),
        ),
        (
            ["--config", str(file)],
            {},
            (f"{former.name} in {file}", f"{new.name} in {file}"),
        ),
    ):
        with pytest.raises(ConfigError) as refusal:
            read(*flags, **environment)
        first, second = sources
        assert str(refusal.value) == (
            f"{first} and {second}: {new.name} replaces {former.name}; give only one of them"
        )


@pytest.mark.parametrize("former", FORMER_SETTINGS, ids=lambda former: former.name)
def test_a_later_source_overrides_the_other_name(former: FormerSetting) -> None:
    if former.new is None:
        return
    (new,) = (setting for setting in SETTINGS if setting.name == former.new)
    assert read(f"--{new.name}", "78", **{former.setting.variable: "77"}) == read(
        f"--{new.name}", "78"
    )
    later = read(f"--{former.name}", "77", **{new.variable: "78"})
    assert value_at(former.setting.target, later) == 77


@pytest.mark.parametrize("former", FORMER_SETTINGS, ids=lambda former: former.name)
def test_a_wrong_value_names_what_was_written(former: FormerSetting) -> None:
    with pytest.raises(ConfigError, match=f"^--{former.name}: must be "):
        read(f"--{former.name}", "many")


def test_help_and_hints_do_not_have_former_settings(capsys: pytest.CaptureFixture[str]) -> None:
    text = parser().format_help()
    for former in FORMER_SETTINGS:
        assert f"--{former.name} " not in text
    with pytest.raises(SystemExit):
        parser().parse_args(["--max-adapter-siz", "1"])
    assert "max-adapter-size" not in capsys.readouterr().err


def test_what_was_valid_together_stays_so() -> None:
    _, server = read("--max-body-size", "16MiB", "--max-tokenize-bytes", "512KiB")
    assert (server.max_body_bytes, server.max_tokenize_bytes) == (16 << 20, 512 << 10)


@pytest.mark.parametrize(
    ("flag", "size", "wanted"),
    [
        (
            "--max-data-bytes",
            "40GiB",
            {
                "server.max_files_bytes": 18 << 30,
                "server.max_conversations_bytes": 2 << 30,
                "server.max_training_bytes": 20 << 30,
                "server.max_training_session_bytes": 2 << 30,
                "server.max_training_sessions": 204,
            },
        ),
        (
            "--max-body-bytes",
            "96MiB",
            {
                "server.max_body_bytes": 96 << 20,
                "server.max_tokenize_bytes": 12 << 20,
                "media.max_bytes": 32 << 20,
            },
        ),
        # No body or image is refused that the defaults allow beside a smaller limit.
        (
            "--max-body-bytes",
            "4MiB",
            {"server.max_tokenize_bytes": 1 << 20, "media.max_bytes": 20 << 20},
        ),
        (
            "--max-stored-responses-bytes",
            "1GiB",
            {"server.max_stored_bytes": 1 << 30, "server.max_stored_responses": 4096},
        ),
        (
            "--max-stored-responses-bytes",
            "1MiB",
            {"server.max_stored_bytes": 1 << 20, "server.max_stored_responses": 1024},
        ),
        (
            "--max-stored-responses-bytes",
            "0",
            {"server.max_stored_bytes": 0, "server.max_stored_responses": 0},
        ),
        (
            "--result-cache-bytes",
            "1MiB",
            {"encoders.cache_bytes": 1 << 20, "server.training_cache_bytes": 1 << 20},
        ),
    ],
)
def test_a_setting_divides_its_value(flag: str, size: str, wanted: dict[str, int]) -> None:
    configuration = read(flag, size)
    assert {target: value_at(target, configuration) for target in wanted} == wanted


def test_the_whole_of_the_default_is_the_default_of_its_parts() -> None:
    _, server = read("--max-data-bytes", "20GiB")
    default = ServerConfig()
    assert server.max_files_bytes == default.max_files_bytes
    assert server.max_conversations_bytes == default.max_conversations_bytes
    assert server.max_training_bytes == default.max_training_bytes
    assert server.max_training_session_bytes == default.max_training_session_bytes
    assert server.max_training_sessions >= default.max_training_sessions
    stored = read("--max-stored-responses-bytes", str(default.max_stored_bytes))[1]
    assert stored.max_stored_responses == default.max_stored_responses
    assert read("--max-body-bytes", str(default.max_body_bytes))[1].max_tokenize_bytes == (
        default.max_tokenize_bytes
    )
