"""Loading a model with wrong files fails with one line that names the model."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.config import CacheConfig, EngineConfig, ModelConfig, SpeculativeConfig
from mlx_parallm.demo_models.folders import DEMO_FOLDER, DEMO_FOLDERS
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.models.checkpoints.decoder_sizes import DEFAULT_MAX_MODEL_LEN
from mlx_parallm.models.checkpoints.decoders import architecture
from mlx_parallm.models.load_failures import MAX_CHARS, load_failures
from mlx_parallm.serving.build import build_engines
from mlx_parallm.types.errors import ConfigError, InvalidRequestError, ModelLoadError
from mlx_parallm.worker.worker import Worker


def changed(folder: Path, source: Path, file: str, key: str, value: Any) -> Path:
    """Copy a model with another value of one field; return the folder."""
    shutil.copytree(source, folder)
    content = json.loads((folder / file).read_text())
    content[key] = value
    (folder / file).write_text(json.dumps(content))
    return folder


def refusal(config: EngineConfig) -> str:
    with pytest.raises(ModelLoadError) as refused:
        build_engines(config, MetricFamilies(), Worker(), lambda _text, _share: None)
    return str(refused.value)


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        # Raised by transformers, huggingface_hub, mlx_lm, MLX and this project in turn.
        ("config.json", "attention_bias", "yes"),
        ("config.json", "layer_types", ["wrong"]),
        ("config.json", "auto_map", None),
        ("config.json", "id2label", "x"),
        ("config.json", "quantization_config", "x"),
        ("config.json", "hidden_size", 0),
        ("config.json", "vocab_size", 0),
        ("config.json", "head_dim", None),
        ("config.json", "rope_scaling", "x"),
        ("config.json", "eos_token_id", 1.5),
        ("generation_config.json", "eos_token_id", ["a"]),
        ("tokenizer_config.json", "added_tokens_decoder", []),
        ("tokenizer_config.json", "model_max_length", {}),
    ],
)
def test_a_generator(tmp_path: Path, file: str, key: str, value: Any) -> None:
    folder = changed(tmp_path / "model", DEMO_FOLDER, file, key, value)
    message = refusal(EngineConfig(models=(ModelConfig(path=str(folder)),)))
    assert message.startswith(str(folder))
    assert key in message
    assert "\n" not in message


@pytest.mark.parametrize("value", [3, {"a": 1}, [3], [], None, "Name"])
def test_architectures_that_are_no_list_of_names(value: Any) -> None:
    assert architecture({"architectures": value}) == ("Name" if value == "Name" else "")


@pytest.mark.parametrize(
    ("key", "value"), [("hidden_size", 0), ("num_attention_heads", 0), ("hidden_act", [])]
)
def test_an_encoder(tmp_path: Path, key: str, value: Any) -> None:
    folder = changed(tmp_path / "model", DEMO_FOLDERS["demo:embed"], "config.json", key, value)
    message = refusal(EngineConfig(models=(ModelConfig(path=str(folder)),)))
    assert message.startswith(str(folder))
    assert "\n" not in message


@pytest.mark.parametrize("content", ["[]", "3", '{"a"', ""])
@pytest.mark.parametrize(
    "file", ["config.json", "tokenizer_config.json", "generation_config.json", "tokenizer.json"]
)
def test_a_file_that_is_no_json_object_is_named(tmp_path: Path, file: str, content: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_FOLDER, folder)
    (folder / file).write_text(content)
    message = refusal(EngineConfig(models=(ModelConfig(path=str(folder)),)))
    assert message.startswith(str(folder))
    assert file in message
    assert "\n" not in message


@pytest.mark.parametrize("length", [0, -1])
def test_no_positive_context_is_none(tmp_path: Path, length: int) -> None:
    """Some configs have 0 or -1 for no limit."""
    file, key = "config.json", "max_position_embeddings"
    folder = changed(tmp_path / "model", DEMO_FOLDER, file, key, length)
    # As much as a sequence of the default length takes.
    cache = CacheConfig(kv_cache_bytes=100 << 20)
    config = EngineConfig(models=(ModelConfig(path=str(folder)),), cache=cache)
    (built,) = build_engines(config, MetricFamilies(), Worker(), lambda _text, _share: None)
    assert isinstance(built.model, GenerationModel)
    assert built.model.info.max_model_len == DEFAULT_MAX_MODEL_LEN


def test_a_context_beyond_the_models_names_the_model(tmp_path: Path) -> None:
    config = EngineConfig(models=(ModelConfig(path=str(DEMO_FOLDER), max_model_len=99_999),))
    wanted = re.escape(f"{DEMO_FOLDER}: --max-model-len is 99999; the model takes 8192 tokens.")
    with pytest.raises(ConfigError, match=wanted):
        build_engines(config, MetricFamilies(), Worker(), lambda _text, _share: None)


def test_a_draft_model_is_named(tmp_path: Path) -> None:
    folder = changed(tmp_path / "draft", DEMO_FOLDER, "config.json", "rope_theta", "x")
    speculative = SpeculativeConfig.from_mapping(
        {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2}
    )
    assert str(folder) in refusal(EngineConfig(speculative=speculative))


def test_serve_ends_with_one_line(tmp_path: Path) -> None:
    folder = changed(tmp_path / "model", DEMO_FOLDER, "config.json", "attention_bias", "yes")
    flags = ["--model", str(folder), "--port", "0", "--log-level", "error"]
    command = [sys.executable, "-m", "mlx_parallm", "serve", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    (line,) = [text for text in done.stderr.splitlines() if "Loading" not in text]
    assert line.startswith(f"mlx_parallm serve: {folder} ")
    assert "attention_bias" in line


def test_the_traceback_is_a_debug_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="mlx_parallm.models.load_failures")
    wanted = pytest.raises(ModelLoadError, match=r"could not be loaded: KeyError: 'x'$")
    with wanted as refused, load_failures(tmp_path):
        raise KeyError("x")
    assert isinstance(refused.value.__cause__, KeyError)
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert record.exc_info is not None


def test_a_long_text_is_cut_and_own_errors_are_kept(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as refused, load_failures(tmp_path):
        raise ValueError("a\nb " * 1000)
    assert len(str(refused.value)) < len(str(tmp_path)) + MAX_CHARS + 50
    with pytest.raises(InvalidRequestError, match=r"^mine$"), load_failures(tmp_path):
        raise InvalidRequestError("mine")
    with pytest.raises(ModelLoadError, match=r"AssertionError$"), load_failures(tmp_path):
        raise AssertionError
