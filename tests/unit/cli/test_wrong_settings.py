"""Settings that are wrong or unknown are named, with a hint where there is one."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from mlx_parallm.cli.configure import warn_of_unknown_variables
from mlx_parallm.cli.settings import SETTINGS
from mlx_parallm.types.errors import ConfigError
from tests.unit.cli.settings_reader import read, read_serve


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
