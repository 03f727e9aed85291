"""OPT, which mlx_lm lacks, against transformers (scripts/golden_decoder_cases.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from tokenizers import Tokenizer, models, pre_tokenizers

from mlx_parallm.config import ModelConfig
from mlx_parallm.tokenizer.loading import load_tokenizer
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.worker.layers.row_layers import RowQuantizedLinear
from mlx_parallm.worker.weights.loader import load_model
from tests.decoder_folders import assert_golden, read_generator
from tests.encoder_folders import golden_arrays, write_encoder, write_golden

ATOL = 1e-4
TABLE = "model.decoder.embed_tokens.weight"
Weights = dict[str, mx.array]


@pytest.fixture(params=["opt_125m", "opt_350m", "opt_plain"])
def golden(request: pytest.FixtureRequest) -> dict[str, Any]:
    return read_generator(request.param)


def load(folder: Path, dtype: str = "auto") -> Any:
    return load_model(ModelConfig(dtype=dtype), folder).model


def test_logits_are_those_of_transformers(golden: dict[str, Any], tmp_path: Path) -> None:
    assert_golden(load(write_golden(tmp_path, golden)), golden)


def test_a_batch_with_caches_equals_each_sequence_alone(
    golden: dict[str, Any], tmp_path: Path
) -> None:
    model = load(write_golden(tmp_path, golden))
    rows = golden["inputs"]["input_ids"]
    width = max(map(len, rows))
    # Padding is on the right, where no token attends to it.
    batch = mx.array([ids + [3] * (width - len(ids)) for ids in rows])
    caches = make_prompt_cache(model)
    parts = [model(part, cache=caches) for part in (batch[:, :4], batch[:, 4:5], batch[:, 5:])]
    together = np.array(mx.concatenate(parts, axis=1))
    for row, expected in zip(together, golden["logits"], strict=True):
        np.testing.assert_allclose(row[: len(expected)], np.array(expected), atol=ATOL)


def without_model(weights: Weights) -> Weights:
    """Name weights as in the first files of the hub, which are of the bare model."""
    renamed = {name.removeprefix("model."): array for name, array in weights.items()}
    return renamed | {"decoder.version": mx.array([3.0])}


def with_head(weights: Weights) -> Weights:
    return weights | {"lm_head.weight": weights[TABLE]}


def with_head_alone(weights: Weights) -> Weights:
    return {name: with_head(weights)[name] for name in with_head(weights) if name != TABLE}


@pytest.mark.parametrize("rename", [without_model, with_head, with_head_alone])
@pytest.mark.parametrize("name", ["opt_125m", "opt_350m"])
def test_all_names_of_checkpoints_load(
    name: str, rename: Callable[[Weights], Weights], tmp_path: Path
) -> None:
    golden = read_generator(name)
    weights = rename(golden_arrays(golden))
    assert_golden(load(write_encoder(tmp_path, golden["config"], weights)), golden)


def test_quantised_weights_load_and_run(tmp_path: Path) -> None:
    golden = read_generator("opt_125m")
    model = load(write_golden(tmp_path / "plain", golden))
    nn.quantize(
        model,
        group_size=32,
        bits=8,
        # The input of fc2 is no multiple of the group.
        class_predicate=lambda path, m: hasattr(m, "to_quantized") and not path.endswith("fc2"),
    )
    config = {**golden["config"], "quantization": {"group_size": 32, "bits": 8}}
    arrays: Any = tree_flatten(model.parameters())
    folder = write_encoder(tmp_path / "quantised", config, dict(arrays))
    packed = load(folder, "float32")
    assert isinstance(packed.model.decoder.embed_tokens, nn.QuantizedEmbedding)
    assert type(packed.layers[0].self_attn.q_proj) is RowQuantizedLinear
    for model in (packed, load(folder)):
        assert_golden(model, golden, atol=0.5)


@pytest.mark.parametrize(
    ("field", "value"), [("activation_function", "selu"), ("num_attention_heads", 5)]
)
def test_configs_that_cannot_run_are_refused_by_field(
    field: str, value: Any, tmp_path: Path
) -> None:
    golden = read_generator("opt_125m")
    golden["config"][field] = value
    with pytest.raises(ModelLoadError, match=field):
        load(write_golden(tmp_path, golden))


def test_texts_begin_with_the_end_token(tmp_path: Path) -> None:
    """Check a folder as on the hub: GPT-2's files, and a field that asks for the token."""
    vocab = {word: i for i, word in enumerate(["<s>", "<pad>", "</s>", "<unk>"])}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab |= {char: len(vocab) + i for i, char in enumerate(alphabet)}
    Tokenizer(models.BPE(vocab, [])).model.save(str(tmp_path))
    settings: dict[str, Any] = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>")
    settings |= {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "opt", "eos_token_id": 2}))
    tokenizer = load_tokenizer(tmp_path)
    letters = [vocab["a"], vocab["b"]]
    assert tokenizer.encode("ab") == [2, *letters]
    assert tokenizer.encode("ab", add_special_tokens=False) == letters
    assert tokenizer.encode("") == [2]
