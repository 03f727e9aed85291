"""Settings from flags, environment and file."""

from __future__ import annotations

import argparse
import logging
import re
from dataclasses import fields
from pathlib import Path

import pytest

from mlx_parallm.cli.configure import (
    ACCEPTED,
    add_models,
    add_settings,
    read_settings,
    warn_of_unknown_variables,
)
from mlx_parallm.cli.parser import CommandParser
from mlx_parallm.cli.setting import DEFAULTS, Setting
from mlx_parallm.cli.settings import SETTINGS
from mlx_parallm.config import CacheConfig, EngineConfig, ModelConfig, SpeculativeConfig
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.errors import ConfigError

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


def read(*flags: str, **environment: str) -> tuple[EngineConfig, ServerConfig]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_settings(parser)
    return read_settings(parser.parse_args(flags), environment)


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


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("MLX_PARALLM_PROT", "MLX_PARALLM_PROT (did you mean MLX_PARALLM_PORT?)"),
        (
            "MLX_PARALLM_MAX_NUM_SEQ",
            "MLX_PARALLM_MAX_NUM_SEQ (did you mean MLX_PARALLM_MAX_NUM_SEQS?)",
        ),
        (
            "MLX_PARALLM_GPU_MEMORY_UTILIZATION",
            "MLX_PARALLM_GPU_MEMORY_UTILIZATION (did you mean MLX_PARALLM_KV_MEMORY_FRACTION?)",
        ),
        ("MLX_PARALLM_ZZZZ", "MLX_PARALLM_ZZZZ"),
    ],
)
def test_an_unknown_variable_is_named_with_the_closest_setting(
    caplog: pytest.LogCaptureFixture, name: str, shown: str
) -> None:
    warn_of_unknown_variables({name: "secret", "PATH": "/bin", "MLX_PARALLM_PORT": "1"})
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == f"these environment variables name no setting: {shown}"


def test_all_unknown_variables_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_unknown_variables({"MLX_PARALLM_QQ": "1", "MLX_PARALLM_ZZ": "2"})
    (record,) = caplog.records
    assert record.getMessage().endswith(": MLX_PARALLM_QQ, MLX_PARALLM_ZZ")


def test_known_variables_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    known = dict.fromkeys((setting.variable for setting in SETTINGS), "x")
    warn_of_unknown_variables(known | {"MLX_PARALLM_CONFIG": "x", "MLX_PARALLM_ZZZZ": ""})
    assert caplog.records == []


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


def test_several_models_share_options_and_have_their_own_names() -> None:
    engine, _ = read(
        *("--model", "org/a", "--model", "org/b", "--max-model-len", "99"),
        *("--served-model-name", "org/b=small", "org/b=tiny"),
    )
    assert engine.models == (
        ModelConfig(path="org/a", max_model_len=99),
        ModelConfig(path="org/b", max_model_len=99, served_names=("small", "tiny")),
    )


def per_model_config(*flags: str) -> tuple[ModelConfig, ...]:
    return read("--model", "org/a", "org/a=b", "org/c", *flags)[0].models


def test_a_model_may_have_settings_of_its_own() -> None:
    first, odd, last = per_model_config(
        *("--max-model-len", "99", "--max-model-len", "org/c=7", "--dtype", "org/a=b=float32"),
        *("--revision", "org/a=v=1", "--chat-template", "{% set a=1, %}"),
        *("--chat-template", "org/c=c.jinja", "--kv-cache-dtype", "int8,org/a=b=int4"),
    )
    assert [model.max_model_len for model in (first, odd, last)] == [99, 99, 7]
    assert [model.max_model_len_is_own for model in (first, odd, last)] == [False, False, True]
    assert [model.dtype for model in (first, odd, last)] == ["auto", "float32", "auto"]
    assert [model.revision for model in (first, odd, last)] == ["v=1", None, None]
    templates = [model.chat_template for model in (first, odd, last)]
    assert templates == ["{% set a=1, %}", "{% set a=1, %}", "c.jinja"]
    assert [model.kv_cache_dtype for model in (first, odd, last)] == [None, "int4", None]
    engine, _ = read("--model", "org/a", "org/c", "--kv-cache-dtype", "int8,org/a=int4")
    assert engine.cache.kv_cache_dtype == "int8"


@pytest.mark.parametrize("line", ["{99: x}", "{org/b: 1}", "org/b=1", "[1, org/b=1]"])
def test_a_value_of_a_model_that_is_not_there_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"model: [org/a, org/c]\nmax-model-len: {line}")
    with pytest.raises(ConfigError, match=r"max-model-len in .*: there is no model (99|'org/b')"):
        read("--config", str(file))


def test_a_folder_may_be_named_by_the_last_part_of_its_path(tmp_path: Path) -> None:
    """Name a folder by its path's last part in MODEL=VALUE, as requests do."""
    chat, mlm, twin = (str(tmp_path / part) for part in ("chat", "mlm", "other/mlm"))
    for folder in (chat, mlm, twin):
        Path(folder).mkdir(parents=True)
    flags = ("--max-model-len", "chat=512", "--task", "chat=embed", "--dtype", "chat=float16")
    engine, _ = read("--model", chat, mlm, *flags, "--served-model-name", "chat=talk")
    first, second = engine.models
    assert (first.max_model_len, first.task, first.dtype) == (512, "embed", "float16")
    assert first.served_names == ("talk",)
    assert (second.max_model_len, second.task, second.served_names) == (None, "auto", ())
    known = re.escape(f"; MODEL may be chat, {chat}, {mlm}, {twin}")
    for flag, value in (("max-model-len", "mlm=9"), ("dtype", "mlm=auto"), ("task", "mlm=embed")):
        with pytest.raises(ConfigError, match=rf"{flag}: there is no model 'mlm'{known}$"):
            read("--model", chat, mlm, twin, f"--{flag}", value)


def test_files_and_variables_name_models_too(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    for line in ("{org/a: 5, org/c: 7}", "[5, org/c=7]", "org/a=5,org/c=7"):
        file.write_text(f"model: [org/a, org/c]\nmax-model-len: {line}")
        engine, _ = read("--config", str(file))
        assert [model.max_model_len for model in engine.models] == [5, 7]
    engine, _ = read(MLX_PARALLM_MODEL="org/a,org/c", MLX_PARALLM_MAX_MODEL_LEN="5,org/c=7")
    assert [model.max_model_len for model in engine.models] == [5, 7]


@pytest.mark.parametrize(
    ("lengths", "own", "wanted"),
    [
        (("4096",), 512, 512),
        (("4096",), 8192, 4096),
        (("4096",), None, 4096),
        (("4096", "org/a=600"), 512, 600),
        ((), 512, None),
    ],
)
def test_a_cap_for_all_leaves_shorter_models_as_they_are(
    lengths: tuple[str, ...], own: int | None, wanted: int | None
) -> None:
    flags = [part for length in lengths for part in ("--max-model-len", length)]
    engine, _ = read("--model", "org/a", "org/b", *flags)
    assert engine.max_len_of(engine.models[0], own) == wanted
    alone, _ = read("--model", "org/a", *flags)
    cap = None if not lengths else int(lengths[-1].rpartition("=")[2])
    assert alone.max_len_of(alone.models[0], own) == cap


@pytest.mark.parametrize(
    ("cap", "learned", "wanted"),
    [(None, None, 4096), (None, 1024, 1024), (99, None, 99), (99, 1024, 99), (9999, None, 9999)],
)
def test_sources_are_as_long_as_the_encoder_reads(
    cap: int | None, learned: int | None, wanted: int
) -> None:
    flags = [] if cap is None else ["--max-source-len", str(cap)]
    alone, _ = read("--model", "org/a", *flags)
    assert alone.max_source_len_of(alone.models[0], learned) == wanted


def test_a_source_beyond_learned_positions_is_refused_of_one_model_and_cut_of_several() -> None:
    flags = ["--max-source-len", "2048"]
    alone, _ = read("--model", "org/a", *flags)
    with pytest.raises(ConfigError, match="--max-source-len is 2048; the encoder"):
        alone.max_source_len_of(alone.models[0], 1024)
    several, _ = read("--model", "org/a", "org/b", *flags)
    assert several.max_source_len_of(several.models[0], 1024) == 1024


def test_one_model_takes_bare_names() -> None:
    engine, _ = read("--model", "org/a", "--served-model-name", "x", "y=z")
    assert engine.models == (ModelConfig(path="org/a", served_names=("x", "y=z")),)


def test_the_demonstration_model_can_be_named() -> None:
    assert read("--served-model-name", "demo")[0].models == (ModelConfig(served_names=("demo",)),)


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


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--port", "70000"], "--port: must be a whole number from 0 to 65535, not '70000'"),
        (["--port", "http"], "--port: must be a whole number"),
        (["--max-num-seqs", "0"], "--max-num-seqs: must be a whole number of at least 1"),
        (["--kv-cache-dtype", "q8"], "--kv-cache-dtype: must be one of auto, int8, int4"),
        (["--kv-memory-fraction", "0"], "--kv-memory-fraction: must be a number above 0"),
        (["--kv-memory-fraction", "1.5"], "above 0 up to 1"),
        (["--kv-memory-fraction", "nan"], "--kv-memory-fraction"),
        (["--shutdown-timeout", "inf"], "--shutdown-timeout"),
        (["--max-body-bytes", "8 apples"], "--max-body-bytes: must be a number of bytes"),
        (["--speculative-config", "ngram"], "--speculative-config: must be a JSON object"),
        (["--speculative-config", "[1]"], "--speculative-config: must be a JSON object"),
        (
            ["--speculative-config", '{"method": "x"}'],
            "--speculative-config: method must be one of ngram, draft_model, not 'x'",
        ),
        (
            ["--speculative-config", '{"num_speculative_tokens": -1}'],
            "num_speculative_tokens must be a whole number from 1 to 15, not -1",
        ),
        (["--speculative-config", '{"k": 4}'], "unknown speculative settings: k; known are method"),
        (
            ["--speculative-config", '{"method": "draft_model", "model": ""}'],
            "--speculative-config: model must be a hub id or folder, not ''",
        ),
        (["--speculative-config", "[" * 100_000], "--speculative-config: must be a JSON object"),
        (["--kv-cache-memory-bytes", "9" * 400], "--kv-cache-memory-bytes: must be at least one"),
        (["--dtype", "int4"], "must be one of auto, float32, float16, bfloat16, not 'int4'"),
        (["--api-key", ""], "--api-key: must not contain an empty text"),
        (["--allowed-hosts", "http://a.example"], "--allowed-hosts: must be names or addresses"),
        (["--allowed-hosts", "*.example"], "--allowed-hosts: must be names or addresses"),
        (["--allowed-hosts", "bücher.example"], "--allowed-hosts: must be names or addresses"),
        (["--allowed-hosts", "fe80::1%lo"], "--allowed-hosts: must be names or addresses"),
        (["--limit-mm-per-prompt", '{"video": 0}'], 'as an integer or as {"image": N}'),
        (["--limit-mm-per-prompt", '{"image": 2, "video": 1}'], 'as an integer or as {"image": N}'),
        (["--limit-mm-per-prompt", '{"image": -1}'], "must be a whole number of at least 0"),
        (["--model", "a", "a"], "model: given twice: a"),
        (["--model", "a", "b", "--served-model-name", "c"], "write MODEL=NAME, not 'c'"),
        (["--allow-credentials", "--allowed-origins", "*"], "allow-credentials"),
        (["--cache-scope", "key"], "cache-scope key needs api-key"),
        (["--kv-disk", ""], "--kv-disk: must be a text"),
        (["--kv-disk-bytes", "20GiB"], "--kv-disk-bytes needs --kv-disk, the folder"),
        (["--kv-disk-bytes", "30GiB"], "--kv-disk-bytes needs --kv-disk, the folder"),
        (["--kv-disk", "/kv", "--kv-disk-bytes", "0"], "--kv-disk-bytes: must be at least one"),
        (["--kv-disk", "/kv", "--kv-disk-bytes", "1M"], "--kv-disk-bytes must be at least 16 MiB"),
        (["--kv-host-bytes", "1M"], "--kv-host-bytes must be 0, or at least 16 MiB"),
        (["--kv-disk", "/kv", "--no-enable-prefix-caching"], "--kv-disk keeps cached prefixes"),
        (["--kv-host-bytes", "1G", "--no-enable-prefix-caching"], "--kv-host-bytes keeps cached"),
        (["--config", "/does/not/exist.yaml"], "/does/not/exist.yaml: No such file"),
    ],
)
def test_a_wrong_flag_is_named(flags: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        read(*flags)


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(ConfigError, match="variable MLX_PARALLM_SEED: must be a whole number"):
        read(MLX_PARALLM_SEED="soon")


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.yaml", "prot: 1\nhots: x", "unknown settings: prot, hots"),
        ("a.yaml", "max-num-seqs: true", "max-num-seqs in .*a.yaml: must be a whole number"),
        ("a.yaml", "max-num-seqs: 1.5", "must be a whole number"),
        ("a.yaml", f"shutdown-timeout: {'9' * 400}", "shutdown-timeout in .*: must be a number"),
        ("a.yaml", "speculative-config: {k: 1}", "config in .*a.yaml: unknown .* k; known are"),
        ("a.yaml", "host: 5", "host in .*: must be a text"),
        ("a.yaml", "api-key: [1]", "api-key in .*: must be a text or a list of texts"),
        ("a.yaml", "port: 1\ngpu-memory-utilization: 1\nkv_memory_fraction: 1", "set twice"),
        ("a.yaml", "- port", "must be a table of settings"),
        ("a.yaml", "port: [", "a.yaml: while parsing"),
        ("a.toml", "port: 1", "a.toml: "),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, name: str, content: str, complaint: str) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        read("--config", str(file))


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text("# nothing\n")
    assert read("--config", str(file)) == read()


def test_parsers_are_for_all_models_or_for_one() -> None:
    models = ("--model", "org/a", "org/b")
    engine, _ = read(*models, "--tool-call-parser", "none", "org/b=hermes")
    assert [model.tool_call_parser for model in engine.models] == ["none", "hermes"]
    assert [model.reasoning_parser for model in engine.models] == ["auto", "auto"]
    engine, _ = read(*models, MLX_PARALLM_REASONING_PARSER="qwen3")
    assert [model.reasoning_parser for model in engine.models] == ["qwen3", "qwen3"]


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--tool-call-parser", "nobody"), "hermes"),
        (("--reasoning-parser", "org/c=none"), "org/c"),
        (("--tool-call-parser", "hermes", "none"), "twice"),
        (("--default-chat-template-kwargs", "[1]"), "JSON object"),
        (("--default-chat-template-kwargs", "{"), "JSON object"),
    ],
)
def test_wrong_parsers_and_variables_are_named(flags: tuple[str, ...], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        read(*flags)


def test_variables_of_the_template_are_json() -> None:
    engine, _ = read("--default-chat-template-kwargs", '{"enable_thinking": false}')
    assert engine.models[0].chat_template_kwargs == {"enable_thinking": False}


def test_tasks_are_of_all_models_or_of_one() -> None:
    engine, _ = read("--model", "a", "b", "--task", "embedding", "b=rerank")
    assert [model.task for model in engine.models] == ["embed", "score"]
    assert read("--model", "a", "--convert", "embed")[0].models[0].task == "embed"
    with pytest.raises(ConfigError, match="must be one of auto, generate, embed"):
        read("--task", "a=paint")
    with pytest.raises(ConfigError, match="no model 'c'"):
        read("--model", "a", "--task", "c=embed")


def read_serve(*arguments: str) -> tuple[EngineConfig, ServerConfig]:
    parser = CommandParser(prog="serve")
    add_models(parser)
    add_settings(parser)
    return read_settings(parser.parse_args(arguments), {})


@pytest.mark.parametrize(
    ("arguments", "paths"),
    [
        (["org/a"], ["org/a"]),
        (["org/a", "org/b"], ["org/a", "org/b"]),
        (["org/a", "--port", "8001"], ["org/a"]),
        (["--port", "8001", "org/a"], ["org/a"]),
        (["--enable-auto-tool-choice", "org/a", "--port", "8001", "org/b"], ["org/a", "org/b"]),
        (["org/a", "--model", "org/b"], ["org/a", "org/b"]),
        (["--model", "org/a", "org/b"], ["org/a", "org/b"]),
        ([], [None]),
    ],
)
def test_models_need_no_flag(arguments: list[str], paths: list[str | None]) -> None:
    engine, server = read_serve(*arguments)
    assert [model.path for model in engine.models] == paths
    assert server.port == (8001 if "8001" in arguments else ServerConfig().port)


def test_a_model_given_with_and_without_its_flag_is_given_twice() -> None:
    with pytest.raises(ConfigError, match="given twice: org/a"):
        read_serve("org/a", "--model", "org/a")


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--prot", "--prot (did you mean --port?)"),
        ("--prot=8000", "--prot=8000 (did you mean --port?)"),
        ("--max_model_len=3", "--max_model_len=3 (did you mean --max-model-len?)"),
        ("--max-num", "(did you mean --max-num-batched-tokens or --max-num-seqs or "),
        ("--prefix-caching", "(did you mean --enable-prefix-caching?)"),
        ("--tensor-parallel-size=2", "--tensor-parallel-size=2 (the ranks that mlx.launch starts"),
        ("--pipeline_parallel_size=2", "_size=2 (the ranks that mlx.launch starts"),
        ("--enable-mlm", "--enable-mlm (masked LMs are recognised by their files; name them with"),
        ("--mlm-models=a", "--mlm-models=a (masked LMs are recognised by their files; name them"),
        ("--xyz", "arguments: --xyz\n"),
    ],
)
def test_a_misspelt_flag_has_a_hint(
    flag: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        read_serve("org/a", flag)
    assert hint in capsys.readouterr().err


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
