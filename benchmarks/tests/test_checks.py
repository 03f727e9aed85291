"""Tests of the benchmarks' verdicts and output."""

import json
import math
from importlib.metadata import PackageNotFoundError, version

import pytest

from benchmarks import checks
from benchmarks.checks import Check, conclude
from benchmarks.figures import format_result, replace_marked


@pytest.mark.parametrize(
    ("value", "relation", "limit", "verdict"),
    [
        (2.0, ">=", 2.0, "PASS"),
        (1.9, ">=", 2.0, "FAIL"),
        (0.5, "<=", 0.5, "PASS"),
        (0.6, "<=", 0.5, "FAIL"),
        (1.0, "==", 1.0, "PASS"),
        (0.999, "==", 1.0, "FAIL"),
        (math.nan, "<=", 0.5, "FAIL"),
        (5.0, ">=", None, ""),
    ],
)
def test_verdicts(value, relation, limit, verdict):
    assert Check("it", value, relation, limit).verdict == verdict


def test_one_missed_target_fails_the_benchmark_and_all_is_written(tmp_path, capsys):
    checks = [Check("fine", 3.0, ">=", 2.0), Check("missed", math.nan, "<=", 1.0)]
    assert conclude("trial", checks, {"runs": [1.0, math.nan]}, tmp_path) == 1
    assert "FAIL" in capsys.readouterr().out
    content = json.loads((tmp_path / "trial.json").read_text())
    assert [row["verdict"] for row in content["checks"]] == ["PASS", "FAIL"]
    assert content["details"]["runs"] == [1.0, None]
    assert content["machine"]["mlx_lm"]


def test_all_targets_met_is_success(tmp_path):
    assert (
        conclude("trial", [Check("fine", 3.0, ">=", 2.0), Check("just so", 1.0)], {}, tmp_path) == 0
    )


def test_a_machine_without_git_and_package_metadata_is_described(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(checks, "version", missing)
    monkeypatch.setattr(checks.shutil, "which", lambda name: None)
    about = checks.machine()
    assert about["commit"] == ""
    assert about["mlx"] == version("mlx")
    assert about["mlx_lm"][0].isdigit()


def test_figures_replace_only_what_stands_between_their_marks(tmp_path):
    conclude("trial", [Check("ratio", 2.5, ">=", 2.0), Check("ms", 7.0)], {}, tmp_path)
    table = format_result(json.loads((tmp_path / "trial.json").read_text()))
    page = (
        "a\n<!-- figures: trial -->\nold\n<!-- end -->\nb\n<!-- figures: other -->\n<!-- end -->\n"
    )
    filled = replace_marked(page, "figures: trial", table)
    assert "| ratio | 2.5 | >= 2 | PASS |" in filled
    assert "old" not in filled
    assert filled.endswith("b\n<!-- figures: other -->\n<!-- end -->\n")
    assert replace_marked(filled, "figures: trial", table) == filled
