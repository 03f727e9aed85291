"""Folders as sentence-transformers saves them give its vectors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mlx_parallm.models.checkpoints.sentence_transformers import read_vector_spec
from mlx_parallm.models.loading import open_encoder
from mlx_parallm.tokenizer.encoder_tokenizer import load_encoder_tokenizer
from mlx_parallm.types.pooling import PoolingInput
from mlx_parallm.worker.pooling.loading import load_encoder_runner
from tests.encoder_folders import read_golden, write_golden
from tests.sentence_settings import TEXTS, read_settings, write_files, write_weights

SETTINGS = read_settings()


@pytest.mark.parametrize("form", ["old", "new"])
@pytest.mark.parametrize("name", SETTINGS)
def test_vectors_are_those_of_sentence_transformers(tmp_path: Path, name: str, form: str) -> None:
    golden = SETTINGS[name]
    folder = write_files(write_weights(tmp_path), golden[form])
    runner = load_encoder_runner(folder, "float32", read_vector_spec(folder))
    inputs = [PoolingInput(ids) for ids in load_encoder_tokenizer(folder).encode(TEXTS)]
    for vector, expected in zip(runner.run(inputs), golden["vectors"][form], strict=True):
        np.testing.assert_allclose(vector, expected, atol=1e-4)


@pytest.mark.parametrize("name", ["bert", "bert_sequence", "electra_token"])
def test_token_types_are_given_where_the_config_does_not_count_them(
    tmp_path: Path, name: str
) -> None:
    golden = read_golden(name)
    assert golden["config"].pop("type_vocab_size", 2) == 2
    folder = write_golden(tmp_path, golden)
    assert open_encoder(folder).model.args.type_vocab_size == 2
    runner = load_encoder_runner(folder, "float32", read_vector_spec(folder))
    single, pair = (PoolingInput((5, 6, 7, 8), second_at=second) for second in (None, 2))
    assert np.abs(runner.run([single])[0] - runner.run([pair])[0]).max() > 1e-3
