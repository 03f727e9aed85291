"""Beam search of tiny encoder-decoders against transformers, many searches in one batch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_parallm.config import ModelConfig
from mlx_parallm.generation.device_runner import DeviceRunner
from mlx_parallm.types.model_input import source_of
from mlx_parallm.types.request import GenerateRequest
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.weights.loader import load_model
from tests.compiled_attention import AheadAttention
from tests.encoder_folders import write_golden
from tests.golden_searches import ENCODER_DECODERS, Search, differences, params_of, read_searches
from tests.integration.test_parity_generate import Session
from tests.seq2seq_folders import read_seq2seq
from tests.source_batches import BLOCK_SIZE, OneModel, new_runner

NUM_BLOCKS = 512


class SearchSession(Session):
    """A scheduler over an encoder-decoder; it keeps what beams report at their end."""

    def __init__(self, name: str, folder: Path, *, runs_ahead: bool, num_blocks: int) -> None:
        golden = read_seq2seq(name)
        loaded = load_model(ModelConfig(dtype="float32"), write_golden(folder, golden))
        self.start: int = golden["config"]["decoder_start_token_id"]
        kind = AheadAttention if runs_ahead else ReferenceAttention
        runner = new_runner(loaded, kind(BLOCK_SIZE), num_blocks=NUM_BLOCKS)
        plan: Any = SimpleNamespace(info=runner.info, prepares_shapes=False)
        worker: Any = OneModel(runner)
        super().__init__(DeviceRunner(worker, "m", plan), num_blocks=num_blocks, budget=48)

    def ask(self, number: int, search: Search) -> None:
        """Queue a search, of which at most 8 beams run at once."""
        forced = [search["forced_bos_token_id"]] if "forced_bos_token_id" in search else []
        request = GenerateRequest(
            request_id=str(number),
            model="m",
            prompt_ids=(self.start, *forced),
            inputs=(source_of(search["prompt"]),),
            params=params_of(search),
        )
        self.scheduler.add(request, seed=0, end_ids=frozenset(), weights=self.weights)

    def results(self, number: int, search: Search) -> list[tuple[list[int], float]]:
        """Return the tokens of each result, and the sum of their log-probabilities."""
        texts = [self.tokens[str(number), index] for index in range(search["width"])]
        return [
            (
                [token.token_id for token in text],
                sum(token.logprob.logprob for token in text if token.logprob is not None),
            )
            for text in texts
        ]


@pytest.mark.parametrize(
    ("name", "runs_ahead", "num_blocks"),
    [
        ("bart", False, NUM_BLOCKS),
        *(
            pytest.param(name, runs_ahead, num_blocks, marks=pytest.mark.slow)
            for name in ENCODER_DECODERS
            for runs_ahead, num_blocks in [(False, NUM_BLOCKS), (True, 60)]
            if (name, runs_ahead) != ("bart", False)
        ),
    ],
)
def test_beams_are_those_of_transformers(
    name: str, runs_ahead: bool, num_blocks: int, tmp_path: Path
) -> None:
    searches = [search for search in read_searches(name) if search["width"] > 1]
    session = SearchSession(name, tmp_path, runs_ahead=runs_ahead, num_blocks=num_blocks)
    for number, search in enumerate(searches):
        session.ask(number, search)
    session.finish()
    wrong = {
        number: apart
        for number, search in enumerate(searches)
        if (apart := list(differences(search, session.results(number, search))))
    }
    assert not wrong
    # Each source is encoded once, unless the pool is too small to keep it.
    num_encoded = session.scheduler.stats().sources_computed
    assert num_encoded >= 20
    assert num_blocks < NUM_BLOCKS or num_encoded == 20
