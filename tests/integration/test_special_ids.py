"""Ids that a folder's files name and the model has no vector for; positions beyond its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from mlx_parallm import LLM, SamplingParams
from mlx_parallm.demo_models.folders import DEMO_FOLDER
from mlx_parallm.models.checkpoints.decoder_sizes import context_length
from mlx_parallm.models.loading import open_encoder
from mlx_parallm.types.errors import ConfigError, InvalidRequestError, ModelLoadError
from tests.decoder_folders import read_decoder, read_generator, write_words
from tests.embedder_folder import write_embedder
from tests.encoder_folders import read_golden, write_golden

FAR = 2_000_000


def with_tokenizer(folder: Path, change: Any) -> Path:
    file = folder / "tokenizer.json"
    settings = json.loads(file.read_text())
    change(settings)
    file.write_text(json.dumps(settings))
    return folder


def test_a_token_that_was_added_later_is_refused(tmp_path: Path) -> None:
    folder = write_embedder(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["later"])
    tokenizer.save(str(folder / "tokenizer.json"))
    llm = LLM(str(folder))
    with pytest.raises(InvalidRequestError, match="outside the vocabulary of 99: 99"):
        llm.embed(["w8 later"])
    assert len(llm.embed(["w8 w9"])) == 1


@pytest.mark.parametrize("number", [99, FAR])
def test_a_token_around_every_text_is_refused_at_load(tmp_path: Path, number: int) -> None:
    def change(settings: dict[str, Any]) -> None:
        settings["post_processor"]["special_tokens"]["[CLS]"]["ids"] = [number]

    folder = with_tokenizer(write_embedder(tmp_path), change)
    with pytest.raises(ModelLoadError, match=f"token id {number} .*has 99 rows"):
        LLM(str(folder))


@pytest.mark.parametrize(
    "ids", [{"true_token_id": FAR}, {"true_token_id": 3, "false_token_id": -1}]
)
def test_a_reranker_scores_by_tokens_of_its_vocabulary(tmp_path: Path, ids: dict[str, int]) -> None:
    golden = read_decoder("qwen3_chosen")
    write_golden(tmp_path, golden)
    write_words(tmp_path, golden["config"]["vocab_size"], ends="")
    module = {"path": "1_LogitScore", "type": "sentence_transformers.cross_encoder.LogitScore"}
    (tmp_path / "modules.json").write_text(json.dumps([module]))
    (tmp_path / "1_LogitScore").mkdir()
    (tmp_path / "1_LogitScore" / "config.json").write_text(json.dumps(ids))
    with pytest.raises(ModelLoadError, match="scores by the tokens"):
        LLM(str(tmp_path))


def test_positions_that_the_padding_id_leaves_none_of_are_refused(tmp_path: Path) -> None:
    golden = read_golden("roberta")
    golden["config"]["pad_token_id"] = golden["config"]["max_position_embeddings"]
    with pytest.raises(ModelLoadError, match="no room for a token"):
        open_encoder(write_golden(tmp_path, golden))


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"model_type": "gpt2", "n_positions": 64, "max_position_embeddings": 4096}, 64),
        ({"model_type": "gpt_bigcode", "n_positions": 64, "n_ctx": 128}, 64),
        ({"model_type": "opt", "n_positions": 4096}, 2048),
        ({"model_type": "llama", "max_position_embeddings": 512, "n_positions": 64}, 512),
    ],
)
def test_a_table_of_positions_decides_the_length(config: dict[str, Any], length: int) -> None:
    assert context_length(config) == length


def test_an_end_token_that_the_model_lacks_is_not_banned_on_the_device(tmp_path: Path) -> None:
    for file in DEMO_FOLDER.iterdir():
        if file.name != "generation_config.json":
            (tmp_path / file.name).symlink_to(file)
    settings = json.loads((DEMO_FOLDER / "generation_config.json").read_text())
    settings["eos_token_id"] = [settings["eos_token_id"], FAR]
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    params = SamplingParams(temperature=0.0, max_tokens=8, min_tokens=8)
    tokens = [
        llm.generate(["Anna"], params)[0].outputs[0].token_ids
        for llm in (LLM(str(tmp_path)), LLM())
    ]
    assert tokens[0] == tokens[1]


def test_a_draft_model_has_a_vector_for_every_position_of_its_target(tmp_path: Path) -> None:
    golden = read_generator("gpt2")
    draft = write_golden(tmp_path / "draft", golden)
    golden["config"]["n_positions"] = 96
    golden["weights"]["transformer.wpe.weight"][0] = 96
    target = write_golden(tmp_path / "target", golden)
    for folder in (draft, target):
        write_words(folder, golden["config"]["vocab_size"])
    speculation = {"method": "draft_model", "model": str(draft)}
    with pytest.raises(ConfigError, match="vectors for 40 positions"):
        LLM(str(target), speculative_config=speculation)
    LLM(str(target), speculative_config=speculation, max_model_len=40)
