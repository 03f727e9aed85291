"""`mlx_parallm bench engine` on the embedded model."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_parallm.bench.decode_load import DecodeLoad
from mlx_parallm.cli.main import main


@pytest.fixture(autouse=True)
def garbage_collection_kept() -> Iterator[None]:
    """Undo what a test does to garbage collection. What is frozen stays so: see conftest."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


SMALL = ["bench", "engine", "--batch-size", "2", "--prompt-tokens", "8", "--steps", "3"]


def test_the_table_is_printed_and_the_trace_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.json"
    assert main([*SMALL, "--trace", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "schedule" in shown
    assert "of 3 steps" in shown
    events = json.loads(file.read_text())["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X" and event["tid"] == 1}
    assert {"step", "schedule", "build", "wait", "update", "detokenize", "publish"} <= names
    assert names & {"dispatch", "evaluate"}
    rows = {event["args"]["rows"] for event in events if event["name"] == "build"}
    assert rows == {2}


def test_no_step_waits_for_a_full_garbage_collection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collected: list[int] = []
    num_frozen = gc.get_freeze_count()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collected.append(info["generation"])

    decode = DecodeLoad.decode

    def counted(self: DecodeLoad, steps: int) -> list[float]:
        # Python's own thresholds would trigger one now.
        gc.callbacks.append(note)
        try:
            return decode(self, steps)
        finally:
            gc.callbacks.remove(note)

    gc.set_threshold(20, 2, 2)
    monkeypatch.setattr(DecodeLoad, "decode", counted)
    assert main([*SMALL[:-1], "40"]) == 0
    assert 2 not in collected
    assert gc.get_freeze_count() > num_frozen


def test_what_the_model_cannot_hold_is_a_wrong_setting(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*SMALL[:-4], "--prompt-tokens", "9000", "--steps", "3"]) == 2
    assert "--max-model-len" in capsys.readouterr().err


def test_a_trace_that_cannot_be_written_is_a_wrong_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*SMALL, "--trace", str(tmp_path / "none" / "trace.json")])
    assert "--trace" in capsys.readouterr().err


def test_a_batch_of_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "engine", "--batch-size", "0"])
    assert "--batch-size" in capsys.readouterr().err
