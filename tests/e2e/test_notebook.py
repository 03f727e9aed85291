"""The tutorial notebook runs from top to bottom, and its stored outputs are of this run's form."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.peers import child_process
from scripts.run_notebook import CellError, run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "docs" / "notebooks" / "pooling.ipynb"


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def kinds(cell: dict[str, Any]) -> list[str]:
    return [output["output_type"] for output in cell["outputs"]]


def notebook_of(*sources: str) -> dict[str, Any]:
    return {"cells": [{"cell_type": "code", "source": [source]} for source in sources]}


def test_every_cell_of_the_tutorial_runs(tmp_path: Path):
    stored = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    copy = tmp_path / NOTEBOOK.name
    copy.write_text(json.dumps(stored), encoding="utf-8")
    # The notebook runs in a process of its own, whose end stops the notebook's server.
    target = ["scripts.run_notebook", str(copy), "--store"]
    # No cell needs the hub.
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = child_process.run(target, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    again = json.loads(copy.read_text(encoding="utf-8"))
    for before, after in zip(code_cells(stored), code_cells(again), strict=True):
        assert before["execution_count"] == after["execution_count"]
        assert kinds(before) == kinds(after), "".join(before["source"])


def test_a_failing_cell_is_named_and_ends_the_run():
    notebook = notebook_of("a = 1", "a / 0", "a = 2")
    with pytest.raises(CellError, match="cell 2 failed: ZeroDivisionError"):
        run(notebook)
    assert "outputs" not in notebook["cells"][2]


def test_outputs_are_what_is_printed_and_the_value_of_the_last_line():
    notebook = notebook_of("a = 1\nprint(a)\nprint('b')", "a + 1", "print(a)\n'x\\ny'", "a = None")
    run(notebook)
    outputs = [cell["outputs"] for cell in code_cells(notebook)]
    assert outputs[0] == [{"name": "stdout", "output_type": "stream", "text": ["1\n", "b\n"]}]
    assert outputs[1][0]["data"] == {"text/plain": ["2"]}
    assert [output["output_type"] for output in outputs[2]] == ["stream", "execute_result"]
    assert outputs[3] == []
    assert [cell["execution_count"] for cell in code_cells(notebook)] == [1, 2, 3, 4]
