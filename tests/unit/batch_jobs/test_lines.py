"""Batch files: what is a line, and what is wrong with a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.batch_jobs import lines
from mlx_parallm.batch_jobs.lines import check_file, num_samples, numbered_lines
from mlx_parallm.types.json_values import MAX_ENTRIES, MAX_VALUES

ENDPOINT = "/v1/completions"
LIMIT = 1000


def line(custom_id: Any = "a", **changes: Any) -> bytes:
    body = {"model": "m", "prompt": "say"}
    entry = {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body}
    return json.dumps(entry | changes).encode() + b"\n"


def check(folder: Path, content: bytes) -> lines.FileReport:
    path = folder / "in.jsonl"
    path.write_bytes(content)
    return check_file(path, ENDPOINT, LIMIT)


def test_a_good_file_is_counted(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf" + line("a") + b"\n \n" + line("b").replace(b"\n", b"\r\n") + line("c")
    report = check(tmp_path, content.rstrip())
    assert (report.total, report.model, report.errors) == (3, "m", [])
    other = line("d", body={"model": "n"})
    assert check(tmp_path, line("a") + other).model is None


@pytest.mark.parametrize(
    ("bad", "code", "param"),
    [
        (b"{\n", "invalid_json_line", None),
        (b"[1]\n", "invalid_json_line", None),
        (b"\xff\n", "invalid_json_line", None),
        (b"[" * 900 + b"\n", "invalid_json_line", None),
        (line(body={"x": float("nan")}), "invalid_json_line", None),
        (line(custom_id=1), "invalid_request", "custom_id"),
        (line(body=[]), "invalid_request", "body"),
        (line(body={"stream": True}), "invalid_request", "body.stream"),
        (line(method="GET"), "invalid_method", "method"),
        (line(url="http://x/y"), "invalid_url", "url"),
        (line(url="/v1/chat/completions"), "mismatched_url", "url"),
        (line(url=ENDPOINT + "?x=1"), "mismatched_url", "url"),
        (line("first"), "duplicate_custom_id", "custom_id"),
        (line(body={"x": "y" * LIMIT}), "line_too_long", None),
    ],
)
def test_a_bad_line_is_told_with_its_number(
    tmp_path: Path, bad: bytes, code: str, param: str | None
) -> None:
    report = check(tmp_path, line("first") + b"\n" + bad + line("last"))
    (error,) = report.errors
    assert (error["code"], error["line"], error["param"]) == (code, 3, param)
    assert 0 < len(error["message"]) <= lines.MAX_MESSAGE_CHARS


def test_an_empty_file_and_one_of_too_many_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [error["code"] for error in check(tmp_path, b" \n\n").errors] == ["empty_file"]
    monkeypatch.setattr(lines, "MAX_LINES", 2)
    assert not check(tmp_path, line("a") + line("b")).errors
    errors = check(tmp_path, line("a") + b"{\n" + line("c")).errors
    assert [error["code"] for error in errors] == ["too_many_lines"]


def test_a_report_is_bounded(tmp_path: Path) -> None:
    assert len(check(tmp_path, b"{\n" * 1000).errors) == lines.MAX_ERRORS


@given(st.lists(st.binary(max_size=12)), st.integers(0, 12))
def test_lines_over_a_limit_are_cut_and_the_others_whole(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], limit: int
) -> None:
    path = tmp_path_factory.mktemp("lines") / "in"
    content = b"\n".join(pieces)
    path.write_bytes(content)
    split = [line + b"\n" for line in content.split(b"\n")]
    split[-1] = split[-1][:-1]
    whole = [(number, line) for number, line in enumerate(split, start=1) if line.strip()]
    assert list(numbered_lines(path)) == whole
    expected = [(number, line[: limit + 1]) for number, line in whole]
    assert list(numbered_lines(path, limit)) == [entry for entry in expected if entry[1].strip()]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, 1),
        ({"n": 3}, 3),
        ({"n": "3", "prompt": 1}, 1),
        ({"n": -1}, 1),
        ({"prompt": [1, 2, 3], "n": 2}, 2),
        ({"prompt": ["a", "b"], "n": 2}, 4),
        ({"prompt": [[1], [2], [3]]}, 3),
        ({"prompt": []}, 1),
    ],
)
def test_samples_of_a_body(body: dict[str, Any], expected: int) -> None:
    assert num_samples(body) == expected


@pytest.mark.parametrize(
    ("unit", "most"), [("[]", MAX_VALUES - 3), ("{}", MAX_VALUES - 3), ("1", MAX_ENTRIES - 3)]
)
def test_a_line_has_so_many_values_at_most(tmp_path: Path, unit: str, most: int) -> None:
    for number, codes in [(most, []), (most + 4, ["too_many_values"])]:
        raw = line(body={"x": "HERE"}).replace(b'"HERE"', f"[{','.join([unit] * number)}]".encode())
        (tmp_path / "file").write_bytes(raw)
        report = check_file(tmp_path / "file", ENDPOINT, len(raw))
        assert [error["code"] for error in report.errors] == codes


@pytest.mark.parametrize("text", ["[", ":", ",", '"{', '\\"[', "\\\\[", "\n{"])
def test_texts_of_a_line_may_hold_any_number_of_brackets(tmp_path: Path, text: str) -> None:
    raw = line(body={"x": text * (MAX_ENTRIES + 1), "y": "]"})
    (tmp_path / "file").write_bytes(raw)
    assert not check_file(tmp_path / "file", ENDPOINT, len(raw)).errors
