"""The word error rate: words, errors, files with transcripts, and a run over made-up ones."""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path

import numpy as np
import pytest

from benchmarks import check_speech
from benchmarks.check_speech import Clip, DataError, Result, checks_of, read_clips, word_errors
from tests.builders.speech_folders import write_speech


def wav(seconds: float) -> bytes:
    """Return a WAV file of noise."""
    samples = np.random.RandomState(0).standard_normal(int(16000 * seconds)) * 3000
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 16000, 0, "NONE", ""))
        writer.writeframes(samples.astype("<i2").tobytes())
    return file.getvalue()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Don\u2019t STOP, now\u2014please!", ["dont", "stop", "now", "please"]),
        ("  Grüße an  Émile (3.5 %)\n", ["grüße", "an", "émile", "3", "5"]),
        ("...", []),
        ("हिन्दी भाषा", ["हिन्दी", "भाषा"]),
    ],
)
def test_words_have_no_case_and_no_punctuation(text: str, words: list[str]) -> None:
    assert check_speech.words_of(text) == words


@pytest.mark.parametrize(
    ("reference", "hypothesis", "errors"),
    [
        ("a b c", "a b c", 0),
        ("a b c", "a x c", 1),
        ("a b c", "a c", 1),
        ("a b c", "z a b c", 1),
        ("a b c", "", 3),
        ("", "a b", 2),
        ("a b c d", "b c d e", 2),
        ("a b", "b a", 2),
    ],
)
def test_errors_are_the_fewest_changes(reference: str, hypothesis: str, errors: int) -> None:
    assert word_errors(reference.split(), hypothesis.split()) == errors


def test_the_rate_is_over_all_words_of_files_that_were_heard() -> None:
    results = [
        Result(Clip(Path("a.wav"), "One two three."), "one two", 2.0),
        Result(Clip(Path("b.wav"), "four"), "Four!", 4.0),
        Result(Clip(Path("c.wav"), "five six"), error="no"),
    ]
    checks = {each.what: each for each in checks_of(results, 3.0, 0.2)}
    assert checks["word error rate"].value == 0.25
    assert checks["word error rate"].verdict == "FAIL"
    assert checks["files that failed"].verdict == "FAIL"
    assert checks["seconds of audio a second"].value == 2.0
    assert checks_of([], 1.0, None)[3].value != checks_of([], 1.0, None)[3].value


def test_a_folder_has_clips_where_a_text_stands_beside_the_audio(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    for name in ("a.wav", "part/b.FLAC", "part/without.mp3"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "part" / "b.txt").write_text("second")
    assert [clip.text for clip in read_clips(tmp_path)] == ["first", "second"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="same stem"):
        read_clips(tmp_path / "empty")


def test_manifests_name_files_beside_them(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"")
    table, lines = tmp_path / "all.tsv", tmp_path / "all.jsonl"
    table.write_text("a.wav\tHello there\n\n")
    lines.write_text(json.dumps({"audio": "a.wav", "text": "Hello there"}) + "\n")
    assert read_clips(table) == read_clips(lines) == [Clip(tmp_path / "a.wav", "Hello there")]
    for file, text, match in (
        (table, "a.wav Hello\n", "Line 1"),
        (table, "b.wav\tHello\n", "does not exist"),
        (lines, '{"audio": "a.wav"}\n', "Line 1"),
        (lines, "[]\n", "Line 1"),
    ):
        file.write_text(text)
        with pytest.raises(DataError, match=match):
            read_clips(file)
    with pytest.raises(DataError, match="no folder"):
        read_clips(tmp_path / "missing")


def test_a_model_is_measured_over_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data = write_speech(tmp_path / "model"), tmp_path / "data"
    data.mkdir()
    for name, seconds in (("a", 1.0), ("b", 2.5)):
        (data / f"{name}.wav").write_bytes(wav(seconds))
        (data / f"{name}.txt").write_text("These are four words.")
    (data / "c.mp3").write_bytes(b"no audio")
    (data / "c.txt").write_text("lost")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "sys.argv", ["check_speech", "--model", str(model), "--data", str(data), "--language", "en"]
    )
    assert check_speech.main() == 1
    printed = capsys.readouterr().out
    assert "failed  c.mp3: Error code: 400" in printed
    content = json.loads((tmp_path / "results" / "check_speech.json").read_text())
    checks = {each["what"]: each["value"] for each in content["checks"]}
    assert checks["files"] == 2
    assert checks["files that failed"] == 1
    assert checks["words"] == 8
    assert checks["seconds of audio"] == pytest.approx(3.5)
    errors = [each["errors"] for each in content["details"]["files"] if not each["error"]]
    assert checks["word error rate"] == pytest.approx(sum(errors) / 8)
