"""Rules are read from the generation configs that folders of Whisper have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.tokenizer.loading import load_tokenizer
from mlx_parallm.tokenizer.speech.rules import GENERATION, SpeechRules, read_speech_rules
from mlx_parallm.types.errors import ModelLoadError
from tests.builders.speech_folders import BEGIN, END, IDS, write_speech

LANGUAGES = {code: IDS[f"<|{code}|>"] for code in ("en", "de", "fr")}
TASKS = {task: IDS[f"<|{task}|>"] for task in ("transcribe", "translate")}


def rules_of(
    folder: Path, fields: Mapping[str, Any] | None = None, *, without: tuple[str, ...] = ()
) -> SpeechRules:
    """Return the rules of a folder whose generation config has other fields."""
    write_speech(folder)
    file = folder / GENERATION
    values = json.loads(file.read_text()) | dict(fields or {})
    file.write_text(
        json.dumps({name: each for name, each in values.items() if name not in without})
    )
    return read(folder)


def read(folder: Path) -> SpeechRules:
    rules = read_speech_rules(folder, load_tokenizer(folder))
    assert rules is not None
    return rules


def test_the_fields_of_a_multilingual_model(tmp_path: Path) -> None:
    # As openai/whisper-large-v3 has them.
    fields = {
        "alignment_heads": [[7, 0]],
        "forced_decoder_ids": [[1, None], [2, IDS["<|transcribe|>"]]],
        "lang_to_id": {"<|de|>": LANGUAGES["de"], "<|en|>": LANGUAGES["en"]},
        "max_length": 448,
        "return_timestamps": False,
        "task_to_id": TASKS,
    }
    rules = rules_of(tmp_path, fields)
    assert rules.languages == {"de": LANGUAGES["de"], "en": LANGUAGES["en"]}
    assert rules.tasks == TASKS
    assert (rules.start_id, rules.end_id) == (IDS["<|startoftranscript|>"], END)
    assert (rules.timestamp_begin, rules.max_initial) == (BEGIN, 50)
    assert rules.begin_banned_ids == (32, END)
    assert set(rules.banned_ids) >= {0, IDS["<|startofprev|>"]}
    assert (rules.num_mels, rules.max_length) == (80, 64)


@pytest.mark.parametrize("value", [None, [], [-1]])
def test_lists_without_tokens_ban_none(tmp_path: Path, value: list[int] | None) -> None:
    fields = {
        "suppress_tokens": value,
        "begin_suppress_tokens": value,
        "forced_decoder_ids": None,
        "lang_to_id": None,
    }
    rules = rules_of(tmp_path, fields)
    assert (rules.banned_ids, rules.begin_banned_ids) == ((), ())
    assert rules.languages == LANGUAGES


def test_tokens_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="suppress_tokens"):
        rules_of(tmp_path, {"suppress_tokens": [-2]})


def test_the_vocabulary_has_what_a_file_lacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ("decoder_start_token_id", "eos_token_id", "no_timestamps_token_id")
    rules = rules_of(tmp_path, without=(*names, "is_multilingual"))
    assert (rules.languages, rules.tasks) == (LANGUAGES, TASKS)
    assert GENERATION not in caplog.text
    (tmp_path / GENERATION).unlink()
    bare = read(tmp_path)
    assert f"has no {GENERATION}, so no tokens are suppressed" in caplog.text
    assert (bare.start_id, bare.end_id, bare.timestamp_begin) == (
        rules.start_id,
        rules.end_id,
        rules.timestamp_begin,
    )
    assert bare.languages == rules.languages


@pytest.mark.parametrize("has_ids", [True, False])
def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path, *, has_ids: bool) -> None:
    # As mlx-community's folders are, with the ids of another folder's generation config or without.
    write_speech(tmp_path)
    names = ["tokenizer.json", "tokenizer_config.json", *([] if has_ids else [GENERATION])]
    for name in names:
        (tmp_path / name).unlink()
    with pytest.raises(ModelLoadError, match=r"need tokenizer\.json"):
        read(tmp_path)


def test_models_of_english_have_no_languages(tmp_path: Path) -> None:
    rules = rules_of(tmp_path, {"is_multilingual": False})
    assert (rules.languages, rules.tasks) == ({}, {})
    prompt = rules.prompt("en", "transcribe", has_timestamps=False)
    assert prompt == [rules.start_id, rules.no_timestamps_id]


def test_a_server_may_have_less_room_than_the_model(tmp_path: Path) -> None:
    rules = rules_of(tmp_path)
    assert rules.within(1000) == rules
    short = rules.within(32)
    assert (short.max_length, short.most_previous) == (32, 15)
    prompt = short.prompt("de", "transcribe", has_timestamps=False, previous=range(100))
    assert prompt[:2] == [rules.previous_id, 85]
    assert len(prompt) < 32
