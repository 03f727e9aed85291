"""The tasks of decoders' folders, and how rerankers and reward models read their inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_parallm.config import EngineConfig, ModelConfig, ModelTask
from mlx_parallm.models.checkpoints.model_task import decoder_plan, decoder_task, tasks_for
from mlx_parallm.models.checkpoints.sentence_transformers import VectorSpec
from mlx_parallm.pooling.kind import PoolingKind, is_read, tokenizer_of
from mlx_parallm.pooling.pending import pooling_spec
from mlx_parallm.tokenizer.decoder_tokenizer import QWEN3_BEGIN, QWEN3_END
from mlx_parallm.tokenizer.encoder_tokenizer import EncoderTokenizer
from mlx_parallm.types.errors import ConfigError, ModelLoadError
from mlx_parallm.types.pooling import PoolingInput
from mlx_parallm.worker.pooling.decoder_loading import open_decoder
from mlx_parallm.worker.pooling.decoder_runner import DecoderRunner
from mlx_parallm.worker.pooling.encoder_adapters import AdaptedEncoder
from mlx_parallm.worker.pooling.loading import open_runner
from tests.decoder_folders import read_decoder, write_decoder_embedder, write_words
from tests.encoder_folders import golden_arrays, write_encoder, write_golden

PAIR_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'query' %}w5 {{ m.content }} w6 "
    "{% elif m.role == 'document' %}{{ m.content }} w7{% endif %}{% endfor %}"
)


def built(folder: Path, task: Any = "auto") -> tuple[AdaptedEncoder, EncoderTokenizer]:
    config = ModelConfig(path=str(folder), task=task)
    assert is_read(config, folder)
    tokenizer = tokenizer_of(config, folder)
    return open_runner(pooling_spec(config, folder, tokenizer)).finish(), tokenizer


def write_causal(folder: Path, name: str = "qwen3_chosen", template: str | None = None) -> Path:
    """Write a causal LM that scores pairs by the tokens 3 (yes) and 4 (no)."""
    golden = read_decoder(name)
    write_golden(folder, golden)
    write_words(folder, golden["config"]["vocab_size"], ends="", template=template)
    return folder


@pytest.mark.parametrize(
    ("template", "is_logged"),
    [
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", True),
        ("{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}", False),
        (PAIR_TEMPLATE, False),
        (None, False),
    ],
)
def test_what_a_chat_template_leaves_out_is_logged_when_the_folder_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, template: str | None, is_logged: bool
) -> None:
    folder = write_causal(tmp_path, template=template)
    config = ModelConfig(path=str(folder), task="embed", served_names=("films",))
    PoolingKind().read(config, folder, EngineConfig())
    line = "The chat template of films refuses or leaves out: tool calls"
    assert (line in caplog.text) == is_logged


def expected_logit(folder: Path, ids: tuple[int, ...], plus: int, minus: int) -> float:
    """Return a score from the rows of the whole LM head, for a model with a tied head."""
    runner = open_runner(
        pooling_spec(ModelConfig(task="embed"), folder, tokenizer_of(ModelConfig(), folder))
    ).finish()
    (hidden,) = runner.run([PoolingInput(ids, "token_embed")])
    table = np.array(golden_arrays(read_decoder("qwen3_chosen"))["model.embed_tokens.weight"])
    return float(hidden[-1] @ (table[plus] - table[minus]))


@pytest.mark.parametrize(
    ("name", "modules", "task"),
    [
        ("Qwen3ForCausalLM", (), "generate"),
        ("GPT2LMHeadModel", (), "generate"),
        ("", (), "generate"),
        ("Qwen3ForCausalLM", ("Transformer", "Pooling"), "embed"),
        ("Qwen3ForCausalLM", ("Transformer", "LogitScore"), "score"),
        ("MistralModel", (), "embed"),
        ("LlamaForSequenceClassification", (), "classify"),
        ("LlamaForSequenceClassification", ("Transformer",), "classify"),
        ("Qwen3ForTokenClassification", (), "token_classify"),
        ("Qwen2ForProcessRewardModel", (), "reward"),
        ("InternLM2ForRewardModel", (), "reward"),
    ],
)
def test_files_say_what_a_decoder_is_for(
    name: str, modules: tuple[str, ...], task: ModelTask
) -> None:
    assert decoder_task({"architectures": [name] if name else None}, modules) == task


def test_a_process_reward_model_reads_tokens() -> None:
    config = {"architectures": ["Qwen2ForProcessRewardModel"]}
    assert decoder_plan("reward", config).tasks[0] == "token_classify"
    assert decoder_plan("reward", {"architectures": ["Qwen2ForRewardModel"]}).tasks[0] == "classify"


def test_what_a_model_cannot_do_is_refused() -> None:
    assert tasks_for("token_classify", ("embed", "token_classify"), "m")[0] == "token_classify"
    for task in ("generate", "classify"):
        with pytest.raises(ConfigError, match="can only do embed"):
            tasks_for(task, ("embed",), "m")


def test_a_model_that_generates_gives_vectors_when_asked(tmp_path: Path) -> None:
    folder = write_causal(tmp_path)
    assert not is_read(ModelConfig(), folder)
    runner, tokenizer = built(folder, "embed")
    assert runner.info.tasks == ("embed", "token_embed")
    assert runner.info.normalizes
    (ids,) = tokenizer.encode(["w8 w9"])
    vector, tokens = runner.run([PoolingInput(ids), PoolingInput(ids, "token_embed")])
    np.testing.assert_allclose(vector, tokens[-1], atol=1e-6)


def test_a_model_that_generates_compares_tokens_when_asked(tmp_path: Path) -> None:
    folder = write_causal(tmp_path)
    runner, _ = built(folder, "token_embed")
    assert runner.info.tasks == ("token_embed", "embed")
    assert runner.run([PoolingInput((5, 6, 7), "token_embed")])[0].shape == (3, runner.info.dims)


def test_a_reranker_scores_a_pair_by_two_tokens(tmp_path: Path) -> None:
    folder = write_causal(tmp_path)
    runner, tokenizer = built(folder, "score")
    ((ids, second),) = tokenizer.encode_pairs([("w8", "w9 w10")])
    assert second is None
    begin, end = tokenizer.encode([QWEN3_BEGIN, QWEN3_END], add_special_tokens=False)
    assert ids[: len(begin)] == begin
    assert ids[-len(end) :] == end
    # A pair that is too long loses tokens of its document.
    cut = tokenizer.cut(ids, len(ids) - 1)
    assert cut == (*ids[: -len(end) - 1], *end)
    (logits,) = runner.run([PoolingInput(ids, "classify")])
    np.testing.assert_allclose(logits, [expected_logit(folder, ids, 3, 4)], atol=1e-4)
    assert len(runner.info.labels) == 1


def test_rerankers_of_sentence_transformers_have_a_template_and_their_tokens(
    tmp_path: Path,
) -> None:
    folder = write_causal(tmp_path, template=PAIR_TEMPLATE)
    modules = [
        {"path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
        {"path": "1_LogitScore", "type": "sentence_transformers.cross_encoder.modules.LogitScore"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir()
    settings = {"true_token_id": 17, "false_token_id": 40}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(settings))
    runner, tokenizer = built(folder)
    ((ids, _),) = tokenizer.encode_pairs([("w8", "w9 w10")])
    assert ids == (5, 8, 6, 9, 10, 7)
    (logits,) = runner.run([PoolingInput(ids, "classify")])
    np.testing.assert_allclose(logits, [expected_logit(folder, ids, 17, 40)], atol=1e-4)


def test_a_reward_model_reads_conversations(tmp_path: Path) -> None:
    golden = read_decoder("llama_sequence")
    template = "{% for m in messages %}{{ m.content }} </s> {% endfor %}"
    write_golden(tmp_path, golden)
    write_words(tmp_path, golden["config"]["vocab_size"], template=template)
    runner, tokenizer = built(tmp_path)
    ids = tokenizer.encode_chat([{"role": "user", "content": "w8"}], add_generation_prompt=False)
    assert ids == (8, 2)
    (logits,) = runner.run([PoolingInput(ids, "classify")])
    assert logits.shape == (1,)


@pytest.mark.parametrize("prefix", ["score", "v_head"])
def test_a_head_of_several_layers(tmp_path: Path, prefix: str) -> None:
    golden = read_decoder("llama_sequence")
    arrays = golden_arrays(golden)
    del arrays["score.weight"]
    source = np.random.default_rng(0)
    shapes = {"0.weight": (32, 32), "0.bias": (32,), "2.weight": (1, 32), "2.bias": (1,)}
    head = {name: source.standard_normal(shape) for name, shape in shapes.items()}
    arrays |= {f"{prefix}.{k}": mx.array(v.astype(np.float32)) for k, v in head.items()}
    golden["config"]["architectures"] = ["Qwen2ForRewardModel"]
    write_encoder(tmp_path, golden["config"], arrays)
    write_words(tmp_path, 99)
    runner, _ = built(tmp_path)
    ids = tuple(golden["inputs"]["input_ids"][0])
    (logits,) = runner.run([PoolingInput(ids, "classify")])
    hidden = np.array(golden["hidden"][0][-1])
    inner = np.maximum(head["0.weight"] @ hidden + head["0.bias"], 0)
    np.testing.assert_allclose(logits, head["2.weight"] @ inner + head["2.bias"], atol=1e-3)


def test_a_missing_head_and_an_unknown_architecture_are_refused_by_name(tmp_path: Path) -> None:
    golden = read_decoder("llama_sequence")
    arrays = golden_arrays(golden)
    del arrays["score.weight"]
    write_words(write_encoder(tmp_path / "a", golden["config"], arrays), 99)
    with pytest.raises(ModelLoadError, match="asks for a head"):
        built(tmp_path / "a")
    # The model's attention takes no mask of a batch.
    golden = read_decoder("gemma2_sequence")
    golden["config"]["is_causal"] = False
    write_words(write_golden(tmp_path / "b", golden), 99)
    with pytest.raises(ModelLoadError, match="gemma2"):
        built(tmp_path / "b")


def is_even(_: str, module: Any) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


@pytest.mark.parametrize("name", ["qwen3_chosen", "llama_chosen"])
def test_quantised_weights_score_nearly_the_same(tmp_path: Path, name: str) -> None:
    golden = read_decoder(name)
    config, chosen = golden["config"], tuple(golden["chosen"])
    plain = open_decoder(
        ModelConfig(), write_golden(tmp_path / "a", golden), decoder_plan("embed", config)
    ).model
    arrays = {f"model.{k.removeprefix('model.')}": v for k, v in golden_arrays(golden).items()}
    if "model.lm_head.weight" in arrays:
        arrays["lm_head.weight"] = arrays.pop("model.lm_head.weight")
        plain.lm_head = nn.Linear(32, 99, bias=False)
        plain.lm_head.weight = arrays["lm_head.weight"]
    nn.quantize(plain, group_size=32, bits=8, class_predicate=is_even)
    quantised = {**config, "quantization": {"group_size": 32, "bits": 8}}
    folder = write_encoder(tmp_path / "b", quantised, dict(tree_flatten(plain.parameters())))
    plan = decoder_plan("score", config, chosen)
    expected = np.array(golden["logits"])
    inputs = [PoolingInput(tuple(ids), "classify") for ids in golden["inputs"]["input_ids"]]
    # On the CPU "auto" dequantises; the other dtype stays.
    for dtype in ("auto", "bfloat16"):
        loaded = open_decoder(ModelConfig(dtype=dtype), folder, plan)
        assert "lm_head" not in loaded.model
        actual = DecoderRunner(loaded, plan, VectorSpec()).run(inputs)
        assert np.abs(np.array(actual) - expected).mean() < 0.3 * np.abs(expected).mean()


def test_weights_in_several_files(tmp_path: Path) -> None:
    folder = write_decoder_embedder(tmp_path)
    arrays = mx.load(str(folder / "model.safetensors"))
    assert isinstance(arrays, dict)
    (folder / "model.safetensors").unlink()
    names = sorted(arrays)
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = folder / f"model-0000{number}-of-00002.safetensors"
        mx.save_safetensors(str(file), {name: arrays[name] for name in part}, {"format": "pt"})
    runner, _ = built(folder)
    golden = read_decoder("qwen3_model")
    (vector,) = runner.run([PoolingInput(tuple(golden["inputs"]["input_ids"][0]))])
    np.testing.assert_allclose(vector, golden["hidden"][0][-1], atol=1e-4)
