"""Vectors of an encoder: how they are pooled, and that batches do not change them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.models.checkpoints.encoders import is_encoder
from mlx_parallm.models.checkpoints.sentence_transformers import VectorSpec, read_vector_spec
from mlx_parallm.tokenizer.encoder_tokenizer import load_encoder_tokenizer
from mlx_parallm.types.errors import ConfigError, ModelLoadError
from mlx_parallm.types.pooling import PoolingInput
from mlx_parallm.worker.pooling.encoder_adapters import AdaptedEncoder
from mlx_parallm.worker.pooling.loading import load_encoder_runner
from mlx_parallm.worker.pooling.vectors import pooled
from tests.embedder_folder import MAX_LEN, write_embedder
from tests.encoder_folders import golden_names, read_golden, write_golden

INPUTS = [(2, 9, 3), (2, 30, 31, 32, 40, 41, 3), (2, 3), (2, *range(5, 24), 3)]


def embed(runner: AdaptedEncoder, inputs: list[tuple[int, ...]]) -> np.ndarray:
    return np.stack(runner.run([PoolingInput(ids) for ids in inputs]))


def wanted(pooling: str, hidden: np.ndarray) -> np.ndarray:
    """Return the vector of one input's hidden states ``[L, D]``, by NumPy."""
    ranks = np.arange(1, len(hidden) + 1)[:, None]
    return {
        "cls": hidden[0],
        "mean": hidden.mean(axis=0),
        "max": hidden.max(axis=0),
        "last": hidden[-1],
        "weightedmean": (hidden * ranks).sum(axis=0) / ranks.sum(),
    }[pooling]


@pytest.mark.parametrize("pooling", ["cls", "mean", "max", "last", "weightedmean"])
def test_padding_is_not_pooled(pooling: Any) -> None:
    source = np.random.default_rng(0)
    lengths = [1, 4, 7]
    hidden = source.standard_normal((3, 7, 5)).astype(np.float32) - 3
    mask = np.arange(7) < np.array(lengths)[:, None]
    actual = np.array(pooled(mx.array(hidden), mx.array(mask.tolist()), [pooling, "cls"]))
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(
            actual[row, :5], wanted(pooling, hidden[row, :length]), rtol=1e-5, atol=1e-6
        )
        np.testing.assert_array_equal(actual[row, 5:], hidden[row, 0])


@pytest.mark.parametrize("normalizes", [True, False])
def test_a_batch_gives_each_inputs_own_vector(tmp_path: Path, normalizes: bool) -> None:
    folder = write_embedder(tmp_path, normalizes=normalizes)
    runner = load_encoder_runner(folder, "auto", read_vector_spec(folder))
    assert runner.info.max_model_len == MAX_LEN
    assert runner.info.dims == 32
    together = embed(runner, INPUTS)
    for ids, vector in zip(INPUTS, together, strict=True):
        np.testing.assert_allclose(embed(runner, [ids])[0], vector, atol=1e-5)
    assert runner.info.normalizes == normalizes


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("1_Pooling/config.json", {"pooling_mode_median_tokens": True}, "pooling"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "median"]}, "pooling"),
        (
            "modules.json",
            [{"path": "", "type": "a.Transformer"}, {"path": "x", "type": "a.LSTM"}],
            "LSTM",
        ),
        ("modules.json", [{"path": "", "type": "a.Pooling"}], "missing"),
    ],
)
def test_what_is_not_served_is_refused(
    tmp_path: Path, name: str, content: Any, reason: str
) -> None:
    folder = write_embedder(tmp_path)
    (folder / name).write_text(json.dumps(content))
    if reason == "missing":
        (folder / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=reason):
        read_vector_spec(folder)


@pytest.mark.parametrize(
    "name",
    [golden_name for golden_name in golden_names() if not read_golden(golden_name)["logits"]],
)
def test_every_architecture_gives_vectors(tmp_path: Path, name: str) -> None:
    golden = read_golden(name)
    folder = write_golden(tmp_path, golden)
    assert is_encoder(folder)
    runner = load_encoder_runner(folder, "auto", VectorSpec())
    inputs = [tuple(ids) for ids in golden["inputs"]["input_ids"]]
    together = embed(runner, inputs)
    for ids, vector in zip(inputs, together, strict=True):
        np.testing.assert_allclose(embed(runner, [ids])[0], vector, atol=1e-4)
    job = runner.begin([PoolingInput(ids) for ids in inputs], {})
    assert job.num_stages > 1
    while job.num_stages > 1:
        job.advance()
    np.testing.assert_array_equal(np.stack(job.wait()), together)


def test_newer_files_name_the_pooling(tmp_path: Path) -> None:
    folder = write_embedder(tmp_path)
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"pooling_mode": ["cls", "lasttoken"]})
    )
    assert read_vector_spec(folder).poolings == ("cls", "last")
    (folder / "modules.json").unlink()
    assert read_vector_spec(folder) == VectorSpec(max_model_len=MAX_LEN)


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="int8"):
        load_encoder_runner(write_embedder(tmp_path), "int8", VectorSpec())


def test_folders_of_encoders_are_known_by_their_config(tmp_path: Path) -> None:
    assert is_encoder(write_embedder(tmp_path / "one"))
    assert not is_encoder(tmp_path / "none")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert not is_encoder(tmp_path)


def test_the_tokenizer_neither_cuts_nor_pads_and_cuts_when_asked(tmp_path: Path) -> None:
    tokenizer = load_encoder_tokenizer(write_embedder(tmp_path))
    (ids,) = tokenizer.encode(["W5 w6 w7 w8 w9 nothing"])
    assert ids == (2, 5, 6, 7, 8, 9, 1, 3)
    assert tokenizer.cut(ids, 5) == (2, 5, 6, 7, 3)
    assert tokenizer.cut(ids, 8) == ids
    assert tokenizer.cut(ids, 1) == (2,)


def test_tasks_of_one_batch_are_those_of_each_alone(tmp_path: Path) -> None:
    golden = read_golden("bert_masked_lm")
    runner = load_encoder_runner(write_golden(tmp_path, golden), "auto", VectorSpec())
    first, second, third = INPUTS[:3]
    inputs = [
        PoolingInput(first, "mlm", places=(1,)),
        PoolingInput(second),
        PoolingInput(second, "mlm", second_at=4, places=(1, 5), candidates=(7, 3)),
        PoolingInput(third, "sparse"),
        PoolingInput(second, "mlm_logprobs", places=(2,)),
        PoolingInput(first, "token_embed"),
    ]
    together = runner.run(inputs)
    vocab = golden["config"]["vocab_size"]
    shapes = [result.shape for result in together]
    assert shapes == [(1, vocab), (32,), (2, 2), (vocab,), (1, vocab), (3, 32)]
    for item, result in zip(inputs, together, strict=True):
        np.testing.assert_allclose(runner.run([item])[0], result, atol=1e-4)
    assert np.isclose(np.exp(together[4]).sum(), 1, atol=1e-5)
    (untyped,) = runner.run([PoolingInput(second, "mlm", places=(1, 5), candidates=(7, 3))])
    assert np.abs(untyped - together[2]).max() > 1e-3
