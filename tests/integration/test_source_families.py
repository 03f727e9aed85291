"""Every family of encoder-decoders runs packed, and batches give the tokens of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_parallm.config import ModelConfig
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.weights.loader import load_model
from tests.compiled_attention import CompiledAttention
from tests.encoder_folders import write_golden
from tests.golden_sources import golden_source
from tests.seq2seq_folders import read_seq2seq, seq2seq_names
from tests.source_batches import BLOCK_SIZE, Batch, Request, new_runner

#: ``QUICK``: families that are tried without the others.
QUICK = {"t5_v1_1", "umt5", "bart", "whisper"}
#: ``NUM_BLOCKS``: for four windows of 30 s.
NUM_BLOCKS = 2048
NAMES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in seq2seq_names()
]


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_gives_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    golden = read_seq2seq(name)
    loaded = load_model(ModelConfig(dtype="float32"), write_golden(tmp_path, golden))
    runner = new_runner(loaded, CompiledAttention(BLOCK_SIZE), NUM_BLOCKS)
    assert runner.info.is_compiled
    cases = golden["sources"]
    requests = [
        Request(
            golden_source(golden["config"], case),
            tuple(case["prompt"]),
            num_tokens=len(case["tokens"]),
        )
        for case in cases
    ]
    answers = Batch(runner, seed=3, num_blocks=NUM_BLOCKS).run(requests)
    for answer, case in zip(answers, cases, strict=True):
        assert [token for token, _ in answer] == case["tokens"]


@pytest.mark.parametrize("name", NAMES)
def test_16_bits_agree_within_their_rounding(name: str, tmp_path: Path) -> None:
    config = ModelConfig(dtype="bfloat16")
    loaded = load_model(config, write_golden(tmp_path, read_seq2seq(name)))
    assert new_runner(loaded, ReferenceAttention(BLOCK_SIZE)).info.path == "packed"
