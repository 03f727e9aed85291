"""Reward models that benchmarks train: what they learn in few steps, and from which files."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks import check_reward
from benchmarks.check_reward import Settings, learn, pairs_of
from benchmarks.reward_learning import LEAST, problem
from examples.mezo.task import reviews
from mlx_parallm import LLM


def test_pairs_have_a_text_of_each_label() -> None:
    rows = [{"label": label, "text": f"{label} {n}"} for label in ("bad", "good") for n in range(4)]
    made = pairs_of(rows[:7], random.Random(0))
    assert len(made) == 3
    assert all(pair["chosen"].startswith("good") for pair in made)
    assert len({text for pair in made for text in pair.values()}) == 6
    with pytest.raises(ValueError, match="1 labels"):
        pairs_of(rows[:2], random.Random(0))


def test_no_text_of_a_test_was_trained_on() -> None:
    train, tests = problem()
    known = {text for pair in train for text in pair.values()}
    others, held_out = (tests[name] for name in LEAST)
    assert known.isdisjoint(text for pair in others for text in pair.values())
    assert len(others) > 240
    assert len(held_out) == 256


def test_praise_comes_to_be_preferred() -> None:
    train, tests = problem()
    few = {name: pairs[:60] for name, pairs in tests.items()}
    run = learn(LLM("demo:mlm"), train[:128], few, Settings(steps=40, rate=1e-2), 0)
    assert run.after["other reviews"] > max(0.7, run.before["other reviews"])


@pytest.mark.slow
def test_a_file_of_labelled_texts_is_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "reviews.tsv"
    rows = reviews(random.Random(0), 300)
    data.write_text("".join(f"{row['label']}\t{row['text']}\n" for row in rows))
    options = ["--model", "demo:mlm", "--data", str(data), "--test-rows", "100", "--steps", "40"]
    assert check_reward.main([*options, "--rate", "1e-2", "--least", "0.7"]) == 0
    assert check_reward.main([*options, "--steps", "1", "--least", "0.99"]) == 1
    checks = json.loads((tmp_path / "results" / "check_reward.json").read_text())["checks"]
    assert [check["what"] for check in checks] == ["test: before", "test: after", "seconds"]
