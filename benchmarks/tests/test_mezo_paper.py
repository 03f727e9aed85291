"""The experiment of MeZO's authors, with a random model in place of theirs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.mezo_paper import drawn, main, parse_arguments
from tests.task_folders import write_task_model

ROWS = [
    {"text": f"the {noun} was {word}", "label": label}
    for noun in ("cat", "dog", "movie", "day", "song", "view", "play", "tale", "book", "talk")
    for word, label in (("good", "1"), ("bad", "0"))
]


def write_rows(path: Path) -> Path:
    path.write_text("".join(f"{row['label']}\t{row['text']}\n" for row in ROWS))
    return path


def test_a_random_model_runs_the_protocol(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_task_model(tmp_path, "roberta_masked_lm", {})
    flags = ["--model", str(model), "--data", str(write_rows(tmp_path / "sst2.tsv"))]
    sizes = ["--k", "1", "2", "--seeds", "13", "21", "--steps", "4", "--points", "2"]
    command = [*flags, *sizes, "--test-rows", "4", "--out", str(tmp_path / "out")]
    main(command)
    first = capsys.readouterr().out
    # A curve has a point before any step, and two later ones.
    assert len(re.findall(r"paper, seed (13|21): step [024],", first)) == 2 * 2 * 3
    table = [line.split("|")[1:3] for line in first.splitlines() if line.startswith("| ")][1:]
    assert [[cell.strip() for cell in row] for row in table] == [
        *(["1", "0"], ["1", "4"], ["2", "0"], ["2", "4"])
    ]
    main(command)
    # Curves that are complete are found again.
    assert "step" not in capsys.readouterr().out.partition("| k")[0]


def test_no_text_is_drawn_twice_and_seeds_draw_others() -> None:
    draws = [drawn(ROWS, 3, seed) for seed in (13, 21, 42)]
    for train, dev in draws:
        texts = [row["text"] for row in (*train, *dev)]
        assert len(set(texts)) == 12
        assert [row["label"] for row in train] == [row["label"] for row in dev]
        assert sorted(row["label"] for row in train) == ["0"] * 3 + ["1"] * 3
    assert draws[0] != draws[1] != draws[2]
    with pytest.raises(ValueError, match="12 texts of the label 0"):
        drawn(ROWS, 6, 13)


def test_defaults_are_the_papers() -> None:
    options = parse_arguments(["--model", "m", "--data", "d"])
    assert (options.k, options.seeds) == ([16, 512], [13, 21, 42, 87, 100])
    assert (options.steps, options.batch_size, options.test_rows) == (100_000, 64, 1000)
