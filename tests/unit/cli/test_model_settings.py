"""Settings of all models, and of one of several."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlx_parallm.config import ModelConfig
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.errors import ConfigError
from tests.unit.cli.settings_reader import read, read_serve


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


def test_parsers_are_for_all_models_or_for_one() -> None:
    models = ("--model", "org/a", "org/b")
    engine, _ = read(*models, "--tool-call-parser", "none", "org/b=hermes")
    assert [model.tool_call_parser for model in engine.models] == ["none", "hermes"]
    assert [model.reasoning_parser for model in engine.models] == ["auto", "auto"]
    engine, _ = read(*models, MLX_PARALLM_REASONING_PARSER="qwen3")
    assert [model.reasoning_parser for model in engine.models] == ["qwen3", "qwen3"]


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
