"""The rules of encoder-decoders, as their JSON files have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.tokenizer.seq2seq.rules import Seq2SeqRules, TaskDefaults, read_rules
from mlx_parallm.types.errors import ModelLoadError
from tests.builders.seq2seq_folders import write_config, write_json


def read(
    folder: Path, model_type: str = "t5", *, fields: dict[str, Any] | None = None, **named: Any
) -> Seq2SeqRules:
    write_config(folder, model_type, **named, **(fields or {}))
    rules = read_rules(folder)
    assert rules is not None
    return rules


def test_a_decoder_has_no_rules(tmp_path: Path) -> None:
    write_json(tmp_path, "config.json", {"model_type": "llama"})
    assert read_rules(tmp_path) is None


def test_the_newer_file_decides_and_the_older_one_names_the_start(tmp_path: Path) -> None:
    write_json(tmp_path, "generation_config.json", {"num_beams": 4, "forced_eos_token_id": 2})
    rules = read(
        tmp_path, "bart", decoder_start_token_id=2, forced_bos_token_id=0, num_beams=6, min_length=9
    )
    assert rules.decoder_start_id == 2
    assert rules.forced_bos_id is None
    assert rules.forced_eos_ids == (2,)
    assert rules.defaults == TaskDefaults(num_beams=4)


def test_the_older_file_alone_has_all(tmp_path: Path) -> None:
    rules = read(tmp_path, "bart", forced_bos_token_id=0, num_beams=6, max_position_embeddings=1024)
    assert rules.forced_bos_id == 0
    assert rules.defaults.num_beams == 6
    assert rules.max_source_positions == 1024


def test_bart_of_old_forces_its_bos(tmp_path: Path) -> None:
    rules = read(tmp_path, "bart", force_bos_token_to_be_generated=True, bos_token_id=7)
    assert rules.forced_bos_id == 7


def test_the_start_is_bos_if_no_file_names_it(tmp_path: Path) -> None:
    assert read(tmp_path, decoder_start_token_id=None, bos_token_id=5).decoder_start_id == 5


def test_output_of_mbart_may_begin_with_the_language(tmp_path: Path) -> None:
    assert read(tmp_path, "mbart", decoder_start_token_id=None).decoder_start_id is None


def test_tasks_have_their_own_fields_over_those_of_the_model(tmp_path: Path) -> None:
    write_json(tmp_path, "generation_config.json", {"num_beams": 2, "max_length": 50})
    rules = read(
        tmp_path,
        prefix="model: ",
        task_specific_params={
            "summarization": {"prefix": "summarize: ", "num_beams": 4, "early_stopping": True},
            "translation": {"max_length": 300},
        },
    )
    assert rules.of_task("summarization") == TaskDefaults(
        prefix="summarize: ", num_beams=4, early_stopping=True, max_length=50
    )
    assert rules.of_task("translation") == TaskDefaults(
        prefix="model: ", num_beams=2, max_length=300
    )
    assert rules.of_task("other") == rules.of_task(None) == rules.defaults


def test_banned_tokens(tmp_path: Path) -> None:
    rules = read(tmp_path, "marian", bad_words_ids=[[9], [3]], suppress_tokens=[5, 3])
    assert rules.banned_ids == (3, 5, 9)


def test_marian_normalises_again(tmp_path: Path) -> None:
    rules = read(tmp_path, "marian", renormalize_logits=True, repetition_penalty=1.2)
    assert rules.defaults == TaskDefaults(renormalize_logits=True, repetition_penalty=1.2)


def test_fields_that_are_not_served_are_listed_if_they_change_something(tmp_path: Path) -> None:
    rules = read(
        tmp_path, do_sample=True, num_beam_groups=1, diversity_penalty=0.0, sequence_bias=None
    )
    assert rules.unserved == ("do_sample",)


@pytest.mark.parametrize(
    ("defaults", "prompt_len", "least", "most"),
    [
        (TaskDefaults(), 1, 0, None),
        (TaskDefaults(min_length=5, max_length=10), 1, 4, 9),
        (TaskDefaults(min_length=5, max_length=10), 2, 3, 8),
        (TaskDefaults(min_length=5, max_length=10), 12, 0, 1),
        (TaskDefaults(min_length=5, max_length=10, min_new_tokens=3, max_new_tokens=4), 1, 3, 4),
        (TaskDefaults(min_new_tokens=3, max_new_tokens=4), 2, 2, 3),
    ],
)
def test_lengths_count_as_in_transformers(
    defaults: TaskDefaults, prompt_len: int, least: int, most: int | None
) -> None:
    assert defaults.least_tokens(prompt_len) == least
    assert defaults.most_tokens(prompt_len) == most


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("decoder_start_token_id", -1),
        ("decoder_start_token_id", 100),
        ("decoder_start_token_id", "</s>"),
        ("decoder_start_token_id", [1, 2]),
        ("decoder_start_token_id", True),
        ("forced_bos_token_id", 100),
        ("forced_eos_token_id", [1, 100]),
        ("bad_words_ids", [[1, 2]]),
        ("bad_words_ids", [3]),
        ("bad_words_ids", [[100]]),
        ("suppress_tokens", [100]),
        ("num_beams", 0),
        ("num_beams", 2.5),
        ("length_penalty", "2"),
        ("length_penalty", float("nan")),
        ("early_stopping", "always"),
        ("no_repeat_ngram_size", -1),
        ("min_length", -1),
        ("max_length", 0),
        ("min_new_tokens", "3"),
        ("max_new_tokens", 0),
        ("prefix", 3),
        ("renormalize_logits", 1),
        ("repetition_penalty", 0),
        ("repetition_penalty", "1"),
        ("task_specific_params", ["summarization"]),
        ("task_specific_params", {"summarization": {"num_beams": 0}}),
        ("task_specific_params", {"summarization": 3}),
    ],
)
def test_a_broken_value_is_named(tmp_path: Path, field: str, value: Any) -> None:
    named = "num_beams" if isinstance(value, dict) and "num_beams" in str(value) else field
    named = "summarization" if value == {"summarization": 3} else named
    with pytest.raises(ModelLoadError, match=rf"config\.json: {named} is "):
        read(tmp_path, vocab_size=100, fields={field: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"min_length": 11, "max_length": 10},
        {"min_new_tokens": 11, "max_new_tokens": 10},
        {"min_new_tokens": 10, "max_length": 10},
    ],
)
def test_lengths_that_contradict_each_other(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match=r"must be at most the 1[01] tokens"):
        read(tmp_path, fields=fields)


@pytest.mark.parametrize("task", [None, "summarization"])
@pytest.mark.parametrize("fields", [{"num_beams": 65}, {"length_penalty": -10.5}])
def test_beams_that_no_search_has(tmp_path: Path, fields: dict[str, Any], task: str | None) -> None:
    (name,) = fields
    if task is not None:
        fields = {"task_specific_params": {task: fields}}
    with pytest.raises(ModelLoadError, match=rf"config\.json: {name} is "):
        read(tmp_path, fields=fields)


def test_no_start_at_all(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no decoder_start_token_id"):
        read(tmp_path, decoder_start_token_id=None)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_file_that_is_no_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        read_rules(tmp_path)
