"""``mlx_parallm batch``: what it refuses before it loads a model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlx_parallm.cli import batch
from mlx_parallm.cli.main import main


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: object, **options: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(batch, "open_engine", load)


def test_a_missing_input_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text("kept")
    assert main(["batch", str(tmp_path / "in.jsonl"), str(target)]) == 2
    assert "in.jsonl: No such file" in capsys.readouterr().err
    assert target.read_text() == "kept"


@pytest.mark.parametrize("concurrency", ["0", "-1"])
def test_no_lines_at_once_are_refused(
    concurrency: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("{}")
    arguments = ["batch", str(source), str(tmp_path / "out"), "--concurrency", concurrency]
    assert main(arguments) == 2
    assert f"--concurrency: must be at least 1, not {concurrency}" in capsys.readouterr().err


@pytest.mark.parametrize("link", [None, os.link, os.symlink])
def test_the_answers_never_overwrite_the_questions(
    link: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = target = tmp_path / "in.jsonl"
    source.write_text("{}\n")
    if callable(link):
        target = tmp_path / "out.jsonl"
        link(source, target)
    assert main(["batch", str(source), str(target)]) == 2
    assert "overwrite" in capsys.readouterr().err
    assert source.read_text() == "{}\n"


@pytest.mark.parametrize("target", ["missing/out.jsonl", "."])
def test_an_output_that_cannot_be_written_is_named_at_once(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("{}\n")
    assert main(["batch", str(source), str(tmp_path / target)]) == 2
    assert str(tmp_path / target) in capsys.readouterr().err


def test_lines_are_counted_where_they_can_be_read_again(tmp_path: Path) -> None:
    source, pipe = tmp_path / "in.jsonl", tmp_path / "pipe"
    source.write_text("{}\n\n \n{}")
    assert batch.count_lines(source) == 2
    os.mkfifo(pipe)
    assert batch.count_lines(pipe) is None
    assert batch.count_lines(Path(os.devnull)) is None


@pytest.mark.parametrize("total", [8, None])
def test_progress_is_shown_where_there_is_no_terminal(
    total: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with batch.progress(total) as on_answer:
        for _ in range(8):
            on_answer()
    shares = ["12%", "38%", "62%", "88%", "100%"] if total else []
    lines = capsys.readouterr().err.split("\n")[:-1]
    assert [line.split()[-1] for line in lines] == shares
