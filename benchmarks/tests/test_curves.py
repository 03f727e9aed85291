"""Files, tables and plots of learning curves."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.curve_file import CurveFile, forwards_until
from benchmarks.mezo_curves import Point

SETTINGS = {"rank": 8, "targets": ("query", "value")}


def point(step: int, loss: float) -> Point:
    return Point(
        step=step,
        forwards=32 * step,
        seconds=1.0,
        train_loss=None,
        loss=loss,
        accuracy=1 - loss,
        zero_steps=step // 2,
    )


def filled(path: Path) -> CurveFile:
    """Return a file with two complete curves and one that broke off."""
    curves = CurveFile(path, SETTINGS)
    for seed, end in ((0, 0.2), (1, 0.4)):
        curves.begin("ours", seed, 10)
        curves.add(point(0, 0.6))
        curves.add(point(10, end))
    curves.begin("paper", 0, 10)
    curves.add(point(0, 0.6))
    return curves


def test_complete_curves_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "curves.json"
    filled(path)
    again = CurveFile(path, SETTINGS)
    assert again.has("ours", 1)
    assert not again.has("ours", 2)
    assert not again.has("paper", 0)
    again.begin("paper", 0, 10)
    again.add(point(0, 0.5))
    papers = [run for run in json.loads(path.read_text())["runs"] if run["method"] == "paper"]
    assert [len(run["points"]) for run in papers] == [1]


def test_curves_with_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "curves.json"
    filled(path)
    with pytest.raises(ValueError, match="other settings"):
        CurveFile(path, SETTINGS | {"rank": 4})


def test_curves_of_other_files_are_merged_once(tmp_path: Path) -> None:
    filled(tmp_path / "other.json")
    curves = CurveFile(tmp_path / "curves.json", SETTINGS)
    for _ in range(2):
        curves.merge([tmp_path / "other.json"])
    assert [(run["method"], run["seed"]) for run in curves.runs] == [("ours", 0), ("ours", 1)]


def test_table_has_means_of_seeds(tmp_path: Path) -> None:
    rows = filled(tmp_path / "curves.json").table().splitlines()
    assert rows[3] == "| ours | 2 | 10 | 320 | 0.3000 | 70.0% (60.0% to 80.0%) | 50.0% | 1.0 |"


def test_forwards_until_a_loss_are_those_of_the_mean(tmp_path: Path) -> None:
    lines = filled(tmp_path / "curves.json").lines("loss")
    assert forwards_until(lines["ours"], 0.31) == 320
    assert forwards_until(lines["ours"], 0.2) is None


def test_plot_has_each_seed_and_the_mean(tmp_path: Path) -> None:
    svg = ElementTree.fromstring(filled(tmp_path / "curves.json").plot())
    colours = [line.get("stroke") for line in svg.iter("{http://www.w3.org/2000/svg}polyline")]
    # In each of the two panels: two seeds and their mean.
    assert colours.count("#4477aa") == 6
