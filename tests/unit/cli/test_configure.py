"""Settings from flags, environment and file."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from mlx_parallm.cli.configure import ACCEPTED
from mlx_parallm.cli.setting import DEFAULTS, Setting
from mlx_parallm.cli.settings import SETTINGS
from mlx_parallm.config import CacheConfig, EngineConfig, SpeculativeConfig
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.errors import ConfigError
from tests.unit.cli.settings_reader import read

#: These fields of the configuration are composed, not set one by one.
COMPOSED = {
    "kv_peers.key",
    "kv_peers.server_id",
    "model.path",
    "model.served_names",
    "model.tool_call_parser",
    "model.reasoning_parser",
    "model.task",
    "model.max_model_len_is_own",
    "model.kv_cache_dtype",
    "cache.num_engines",
    "memory.num_engines",
    "loading.min_use_s",
    "loading.model",
    "encoders.max_batch_wait_ms",
    "media.max_pixels_in_flight",
    "media.max_fetched_bytes",
    "server.media",
    "engine.models",
    "engine.adapters",
    "engine.cache",
    "engine.memory",
    "engine.scheduler",
    "engine.encoders",
    "engine.loading",
    "engine.ranks",
    "engine.kv_peers",
    "ranks.backend",
    "ranks.rank",
    "ranks.size",
}


def field_of(setting: Setting, engine: EngineConfig, server: ServerConfig) -> object:
    parts = {
        "model": engine.models[0],
        "adapters": engine.adapters,
        "cache": engine.cache,
        "scheduler": engine.scheduler,
        "engine": engine,
        "encoders": engine.encoders,
        "loading": engine.loading,
        "memory": engine.memory,
        "server": server,
    }
    return getattr(parts[setting.part], setting.field)


def test_nothing_given_is_the_defaults() -> None:
    assert read() == (EngineConfig(), ServerConfig())


def test_every_field_of_the_configuration_has_a_setting() -> None:
    targets = {setting.target for setting in SETTINGS} | {
        target for setting in SETTINGS for target, _ in setting.shares
    }
    missing = {
        f"{part}.{field.name}" for part, config in DEFAULTS.items() for field in fields(config)
    }
    assert missing - targets == COMPOSED


def test_names_aliases_and_variables_are_unique() -> None:
    names = [name for setting in ACCEPTED for name in setting.names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("flags", "variable", "line", "wanted"),
    [
        (["--port", "9000"], "9000", "port: 9000", 9000),
        (["--kv-memory-fraction", "0.9"], "0.9", "kv_memory_fraction: 0.9", 0.9),
        (["--kv-cache-memory-bytes", "2GiB"], "2G", "kv-cache-memory-bytes: 2147483648", 2**31),
        (["--mlx-cache-bytes", "0"], "0", "mlx-cache-bytes: 0", 0),
        (["--wired-memory-bytes", "8GiB"], "8G", "wired_memory_bytes: 8589934592", 2**33),
        (["--kv-cache-dtype", "int8"], "int8", "kv-cache-dtype: int8", "int8"),
        (["--pooling-memory-bytes", "4G"], "4GiB", "pooling-memory-bytes: 4g", 2**32),
        (["--max-body-bytes", "512K"], "512k", "max-body-bytes: 512KiB", 2**19),
        (["--api-key", "a", "b"], "a,b", "api-key: [a, b]", ("a", "b")),
        (["--allowed-origins", '["*"]'], '["*"]', "allowed_origins: '*'", ("*",)),
        (
            ["--allowed-hosts", "LLM.example.", "[::0:1]", "fe80::0:1"],
            "llm.example,[::1],fe80::1",
            "allowed-hosts: [llm.example, '::1', 'fe80::1']",
            ("llm.example", "[::1]", "[fe80::1]"),
        ),
        (["--allowed-hosts", "[::0:2]"], "[::2]", "allowed-hosts: '[::2]'", ("[::2]",)),
        (["--no-enable-prefix-caching"], "false", "enable-prefix-caching: false", False),
        (["--kv-disk", "/kv"], "/kv", "kv-disk: /kv", Path("/kv")),
        (["--disable-access-log"], "1", "disable-access-log: true", False),
        (
            ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'],
            '{"num_speculative_tokens": 3}',
            "speculative-config: {method: ngram, num_speculative_tokens: 3}",
            SpeculativeConfig(num_speculative_tokens=3),
        ),
        (["--restart-engine"], "yes", "restart-engine: on", True),
        (["--dtype", "bfloat16"], "bfloat16", "dtype: bfloat16", "bfloat16"),
        (["--root-path", "/llm"], "/llm", "root-path: /llm", "/llm"),
        (["--seed", "7"], "7", "seed: 7", 7),
        (["--shutdown-timeout", "2.5"], "2.5", "shutdown-timeout: 2.5", 2.5),
    ],
)
def test_each_source_gives_the_same_value(
    tmp_path: Path, flags: list[str], variable: str, line: str, wanted: object
) -> None:
    name = re.split(r"[:=]", line)[0].replace("_", "-")
    setting = next(setting for setting in SETTINGS if setting.name == name)
    file = tmp_path / "settings.yaml"
    file.write_text(line)
    for engine, server in (
        read(*flags),
        read(**{setting.variable: variable}),
        read("--config", str(file)),
    ):
        assert field_of(setting, engine, server) == wanted


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('port = 1\nhost = "file"\nroot_path = "/file"\n')
    environment = {
        "MLX_PARALLM_CONFIG": str(file),
        "MLX_PARALLM_PORT": "2",
        "MLX_PARALLM_HOST": "environment",
    }
    _, server = read("--port", "3", **environment)
    assert (server.port, server.host, server.root_path) == (3, "environment", "/file")


def test_the_config_flag_wins_over_its_variable(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("port: 1")
    (tmp_path / "b.yaml").write_text("port: 2")
    environment = {"MLX_PARALLM_CONFIG": str(tmp_path / "a.yaml")}
    assert read("--config", str(tmp_path / "b.yaml"), **environment)[1].port == 2


def test_an_empty_variable_counts_as_not_set() -> None:
    assert read(MLX_PARALLM_PORT="") == read()


def test_a_switch_set_in_the_file_can_be_turned_off_by_a_flag(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("restart-engine: true")
    engine, _ = read("--config", str(file), "--no-restart-engine")
    assert engine.restart_on_failure is False


@pytest.mark.parametrize(
    "name", ["--gpu-memory-utilization", "--max-queue-size", "--uvicorn-log-level"]
)
def test_aliases_are_the_same_setting(name: str) -> None:
    value = {"--gpu-memory-utilization": "0.25", "--max-queue-size": "9"}.get(name, "debug")
    setting = next(setting for setting in SETTINGS if name.removeprefix("--") in setting.aliases)
    assert read(name, value) == read(f"--{setting.name}", value) != read()


def test_places_below_the_kv_pool_have_limits() -> None:
    assert read()[0].cache.kv_disk is None
    assert read("--kv-disk", "~/kv")[0].cache == CacheConfig(
        kv_disk=Path.home() / "kv", kv_disk_bytes=20 << 30, kv_host_bytes=0
    )
    sizes = ("--kv-disk-bytes", "20GiB", "--kv-host-bytes", "16MiB")
    assert read("--kv-disk", "kv", *sizes)[0].cache == CacheConfig(
        kv_disk=Path.cwd() / "kv", kv_host_bytes=16 << 20
    )
    cache = read("--kv-host-bytes", "0", "--no-enable-prefix-caching")[0].cache
    assert cache == CacheConfig(enable_prefix_caching=False)


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text("# nothing\n")
    assert read("--config", str(file)) == read()


def test_an_explicit_body_limit_holds_for_images_too() -> None:
    _, default = read()
    assert (default.max_body_bytes, default.max_media_body_bytes) == (2**23, 2**26)
    _, server = read("--max-body-bytes", "1MiB")
    assert (server.max_body_bytes, server.max_media_body_bytes) == (2**20, 2**20)


@pytest.mark.parametrize(
    "value",
    ["2", '{"image": 2}', '{"image": 2, "video": 0}', '{"image": {"count": 2, "width": 512}}'],
)
def test_a_number_of_images_is_written_as_vllm_does_too(value: str) -> None:
    for flag in ("--max-images-per-request", "--limit-mm-per-prompt"):
        _, server = read(flag, value)
        assert server.media.max_images == 2


def test_keys_of_a_file_are_added_to_others(tmp_path: Path) -> None:
    keys, admin = tmp_path / "keys", tmp_path / "admin"
    keys.write_text("one\n\n  two \r\n")
    admin.write_text("root")
    flags = ["--api-key", "zero", "--api-key-file", str(keys), "--cache-scope", "key"]
    server = read(*flags, MLX_PARALLM_ADMIN_API_KEY_FILE=str(admin))[1]
    assert server.api_keys == ("zero", "one", "two")
    assert server.admin_api_keys == ("root",)


@pytest.mark.parametrize("content", [None, "", "\n \n", b"\xff"])
def test_a_file_without_keys_is_refused_without_showing_it(
    tmp_path: Path, content: str | bytes | None
) -> None:
    file = tmp_path / "keys"
    if isinstance(content, str):
        file.write_text(content)
    elif content is not None:
        file.write_bytes(content)
    reason = "has no key" if isinstance(content, str) else "cannot be read"
    with pytest.raises(ConfigError, match=f"--api-key-file: {re.escape(str(file))} {reason}"):
        read("--api-key-file", str(file))
