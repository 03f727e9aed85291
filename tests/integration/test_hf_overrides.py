"""``--hf-overrides`` changes fields of config.json before anything reads it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
import pytest

from mlx_parallm import LLM, SamplingParams
from mlx_parallm.cli.configure import SourcedValue, build_config
from mlx_parallm.config import ModelConfig
from mlx_parallm.engine.model_files import model_folder
from mlx_parallm.models.checkpoints.overrides import SIZES, overridden
from mlx_parallm.models.loading import load_encoder
from mlx_parallm.types.errors import ConfigError, InvalidRequestError, ModelLoadError
from mlx_parallm.worker.weights.loader import load_model
from mlx_parallm.worker.weights.model_weights import ModelWeights
from mlx_parallm.worker.weights.revision import folder_revision
from tests.decoder_folders import write_decoder_of, write_words
from tests.encoder_folders import read_golden, write_golden

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
OLDER = {"model_type": "llama", "rope_theta": 1e4, "hidden_size": 32}
NEWER = {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
IDS = [5, 9, 14, 20, 8, 7, 30]


def write(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return write_decoder_of(folder, "llama_chosen")


def config_of(folder: Path, **overrides: Any) -> ModelConfig:
    return ModelConfig(path=str(folder), dtype="float32", hf_overrides=overrides)


def fetched(config: ModelConfig) -> Path:
    return model_folder(config, lambda _text, _share: None)


def logits(config: ModelConfig) -> mx.array:
    return load_model(config, fetched(config)).model(mx.array([IDS]))


@pytest.mark.parametrize(
    ("config", "overrides", "expected"),
    [
        (OLDER, {"rope_theta": 5e5}, {**OLDER, "rope_theta": 5e5}),
        (OLDER, {"rope_scaling": YARN}, {**OLDER, "rope_scaling": YARN}),
        (OLDER, {"hidden_size": 32}, OLDER),
        (
            NEWER,
            {"rope_theta": 5e5},
            NEWER
            | {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        ),
        (
            NEWER,
            {"rope_scaling": YARN},
            NEWER | {"rope_scaling": YARN, "rope_parameters": {"rope_theta": 1e4, **YARN}},
        ),
        (
            NEWER,
            {"rope_parameters": YARN},
            {**NEWER, "rope_parameters": {"rope_theta": 1e4, **YARN}},
        ),
        (
            NEWER,
            {"rope_scaling": {"type": "linear", "factor": 2}},
            NEWER
            | {
                "rope_scaling": {"type": "linear", "factor": 2},
                "rope_parameters": {
                    "rope_theta": 1e4,
                    "type": "linear",
                    "rope_type": "linear",
                    "factor": 2,
                },
            },
        ),
        (
            {"text_config": {"a": 1, "b": {"c": 2}}},
            {"text_config": {"b": {"d": 3}}},
            {"text_config": {"a": 1, "b": {"d": 3}}},
        ),
    ],
)
def test_fields_are_replaced(
    config: dict[str, Any], overrides: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert overridden(config, overrides) == expected


@pytest.mark.parametrize(
    "overrides",
    [
        {"num_attention_heads": 2},
        {"head_dim": 4},
        {"text_config": {"hidden_size": 8}},
        {"architectures": ["FancyNet"]},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": []},
        {"architectures": ["FooForCausalLM"]},
        {"architectures": ["LlamaForCausalLM", "FooForCausalLM"]},
        {"architectures": ["MistralForCausalLM"]},
        {"architectures": ["LlamaForFun"]},
        {"architectures": [5]},
        {"text_config": 5},
        {"text_config": {"architectures": ["FooModel"]}},
        *(
            {name: value}
            for name in ("rope_scaling", "rope_parameters", "quantization")
            for value in (5, "yarn", [], True)
        ),
        *({"rope_theta": value} for value in ("big", [], {}, True)),
    ],
)
@pytest.mark.parametrize("base", [OLDER, NEWER], ids=["older", "newer"])
def test_what_cannot_be_changed_is_refused(overrides: dict[str, Any], base: dict[str, Any]) -> None:
    config = {**base, "num_attention_heads": 4, "text_config": {"hidden_size": 4}}
    with pytest.raises(ConfigError, match="hf-overrides"):
        overridden(config, overrides)


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        ({"model_type": "llama"}, {"architectures": ["LlamaForCausalLM"]}),
        ({"model_type": "gpt2"}, {"architectures": ["GPT2LMHeadModel"]}),
        ({"model_type": "xlm-roberta"}, {"architectures": ["XLMRobertaModel"]}),
        (
            {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
            {"architectures": ["Qwen3ForSequenceClassification"]},
        ),
        (
            {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]},
            {"architectures": ["Gemma3TextModel"]},
        ),
        (
            {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
            {"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
        ),
        ({"model_type": "new", "architectures": ["Odd"]}, {"architectures": ["Odd"]}),
    ],
)
def test_classes_of_the_models_family_are_accepted(
    config: dict[str, Any], overrides: dict[str, Any]
) -> None:
    assert overridden(config, overrides) == config | overrides


#: Fields of mlx_lm's configs that count other heads, or a part of one.
NOT_HEADS = {"n_shared_head", "sparse_num_index_heads"}


def head_fields() -> set[str]:
    """Return the fields of mlx_lm's configs that count heads, or channels of one."""
    pattern = r"^    (\w*(?:n_head|heads|head_dim|d_head|kv_channels|query_groups)\w*): "
    folder = Path(mlx_lm.models.__path__[0])
    return {
        name
        for file in folder.glob("*.py")
        for name in re.findall(pattern, file.read_text(encoding="utf-8"), re.MULTILINE)
    }


def test_all_fields_of_heads_are_known() -> None:
    assert head_fields() - NOT_HEADS <= SIZES
    assert {"num_query_groups", "swa_head_dim", "global_head_dim", "kv_channels"} <= SIZES


def test_the_folder_is_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "model")
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert fetched(config_of(folder, rope_theta=5.0)).is_relative_to(cache)
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert (fetched(config_of(folder, rope_theta=5.0)) / "config.json").is_file()


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="fancy"):
        logits(config_of(write(tmp_path), model_type="fancy"))


def test_weights_of_other_shapes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"q_proj\.bias"):
        logits(config_of(write(tmp_path), model_type="qwen2"))


def test_all_readers_find_them(tmp_path: Path) -> None:
    plain, changed = write(tmp_path / "plain"), write(tmp_path / "changed")
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps({**config, "rope_theta": 77.0}))
    overrides = config_of(plain, rope_theta=77.0)
    expected = logits(config_of(changed))
    assert mx.array_equal(logits(overrides), expected)
    assert not mx.allclose(logits(config_of(plain)), expected, atol=1e-3)
    assert folder_revision(fetched(overrides)) != folder_revision(plain)
    assert json.loads((plain / "config.json").read_text()) == config


def test_updates_from_a_folder_have_them(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    config = config_of(folder, tie_word_embeddings=False, rope_theta=77.0)
    weights = ModelWeights(load_model(config, fetched(config)))
    assert weights.read_folder(folder)
    missing = json.loads((folder / "config.json").read_text()) | {"model_type": "fancy"}
    (folder / "config.json").write_text(json.dumps(missing))
    refused = config_of(folder, model_type="llama")
    assert ModelWeights(load_model(refused, fetched(refused))).read_folder(folder)


def test_encoders_have_them(tmp_path: Path) -> None:
    folder = write_golden(tmp_path / "bert", read_golden("bert"))
    config = config_of(folder, hidden_act="relu")
    assert load_encoder(fetched(config)).config["hidden_act"] == "relu"


def test_an_llm_takes_them(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    write_words(folder, 99)
    with (
        LLM(str(folder), hf_overrides={"max_position_embeddings": 17}) as llm,
        pytest.raises(InvalidRequestError, match="17"),
    ):
        llm.generate(["w5 " * 30], SamplingParams(max_tokens=1))
    with pytest.raises(ConfigError, match="hf-overrides"):
        LLM(str(folder), hf_overrides={"num_attention_heads": 1})


def parsed(value: Any, *models: str) -> list[Any]:
    sourced = {"hf-overrides": SourcedValue(value, "--hf-overrides")}
    if models:
        sourced["model"] = SourcedValue(list(models), "--model")
    return [model.hf_overrides for model in build_config(sourced)[0].models]


def test_settings_are_json_for_all_models_or_for_one() -> None:
    both = '{"a": [1, 2], "b": "x=y"}'
    value = {"a": [1, 2], "b": "x=y"}
    assert parsed(both) == [value]
    assert parsed(value) == [value]
    assert parsed(both, "org/one", "org/two") == [value, value]
    assert parsed([f"org/one={both}"], "org/one", "org/two") == [value, {}]
    assert parsed({"org/two": value}, "org/one", "org/two") == [{}, value]
    for wrong in ("[]", "{", "5", f"other={both}"):
        with pytest.raises(ConfigError):
            parsed(wrong, "org/one")
