"""The arithmetic of the benchmark of models that come and go."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.checks import Check
from benchmarks.model_swap.http import Answer
from benchmarks.model_swap.room import NAMES, room_bytes, room_checks
from benchmarks.model_swap.streams import (
    TWENTY_MILLION,
    Moment,
    Round,
    Window,
    gpu_checks,
    seconds_to_read,
    streams_checks,
)


def values(checks: list[Check]) -> dict[str, float]:
    return {check.what.rpartition(": ")[2]: check.value for check in checks}


def failed(checks: list[Check]) -> set[str]:
    return {check.what for check in checks if check.verdict == "FAIL"}


def test_a_window_has_the_gaps_that_overlap_it_and_the_tokens_within() -> None:
    streams = [[0.0, 1.0, 1.5, 4.0], [1.2, 1.4], []]
    window = Window.of(streams, Moment(1.0, 10.0), Moment(3.0, 14.0), other_tokens=3)
    assert window.longest_ms == pytest.approx(2500)
    assert window.tokens_per_s == pytest.approx((3 + 3) / 2)
    assert window.tokens_per_processor_s == pytest.approx((3 + 3) / 4)
    assert Window.of([], Moment(0.0, 0.0), Moment(1.0, 1.0)).longest_ms == 0.0


def round_of(alone_ms: float, beside_ms: float, *, rate: float = 100, **more: float) -> Round:
    return Round(
        alone=Window(alone_ms, 100, 200),
        beside=Window(beside_ms, 50, 2 * rate),
        load_s=more.get("load_s", 1.0),
        unload_s=0.1,
        resident_bytes=int(more.get("resident", 1000)),
    )


def test_gaps_beside_loads_are_compared_with_the_longest_without() -> None:
    rounds = [round_of(10, 35), round_of(20, 30), round_of(15, 39, resident=1020, load_s=3)]
    checks = streams_checks(rounds)
    figures = values(checks)
    assert figures["longest gap beside the first load over that without one"] == 35 / 20
    assert figures["longest gap beside later loads over that without one"] == 39 / 20
    assert figures["resident memory after the last round over that after the first"] == 1.02
    assert checks[2].value == 2.0
    assert failed(checks) == set()


def test_each_target_of_streams_can_be_missed() -> None:
    rounds = [round_of(10, 31, rate=94), round_of(10, 21, rate=94, resident=1031)]
    assert failed(streams_checks(rounds)) == {
        "longest gap beside the first load over that without one",
        "longest gap beside later loads over that without one",
        "tokens per second of the processor, beside loads over without: median",
        "resident memory after the last round over that after the first",
    }


def test_one_round_has_no_later_loads() -> None:
    assert failed(streams_checks([round_of(10, 10)])) == {
        "longest gap beside later loads over that without one"
    }


def test_loads_on_a_gpu_are_compared_with_reading_the_files() -> None:
    rounds = [round_of(10, 90, load_s=13), round_of(10, 60, load_s=11)]
    assert failed(gpu_checks(rounds, 10.0)) == set()
    assert failed(gpu_checks([round_of(10, 101, load_s=13.1), *rounds[:1]], 10.0)) == {
        "longest gap of a stream beside a load, ms",
        "first load over reading the files",
        "later loads over reading the files",
    }


def test_reading_takes_time(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    assert seconds_to_read(tmp_path) > 0


def test_room_is_for_weights_and_contexts(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    context = 8192 * 6 * 2 * 2 * 64 * 4
    assert room_bytes(tmp_path, TWENTY_MILLION, 2.0) == 2 * (1000 + context)


def answer(first_s: float, *, load_s: float | None = None, text: str = "a") -> Answer:
    return Answer(text, 0.0, first_s, first_s + 1, load_s)


def test_waits_for_loads_are_compared_with_requests_and_loads() -> None:
    expected = {(name, 0): "a" for name in NAMES}
    answers = [((NAMES[0], 0), answer(0.5)), ((NAMES[1], 0), answer(2.5, load_s=2.0))]
    checks = room_checks("plain", answers, expected, [1.0, 1.25])
    assert failed(checks) == set()
    figures = values(checks)
    assert figures["longest wait for a load over these"] == pytest.approx(2.5 / 2.75)
    assert figures["requests that waited for a load"] == 1


def test_each_target_of_room_can_be_missed() -> None:
    expected = {(name, 0): "a" for name in NAMES}
    waits = [answer(1, load_s=1) for _ in range(50)] + [answer(9, load_s=9)] * 2
    answers = [((NAMES[0], 0), each) for each in [*waits, answer(0.1), answer(0.1, text="b")]]
    broken = Answer("", 0.0, 1.0, 1.0, error="503")
    checks = room_checks("plain", [*answers, ((NAMES[1], 0), broken)], expected, [1.0])
    assert {check.what for check in checks if check.verdict == "FAIL"} == {
        "plain: errors",
        "plain: answers other than those of one model",
        "plain: longest wait for a load over these",
        "plain: wait for a load: p99 over the median",
    }


def test_without_loads_there_is_nothing_to_compare() -> None:
    checks = room_checks("plain", [((NAMES[0], 0), answer(1))], {(NAMES[0], 0): "a"}, [1.0])
    assert any(math.isnan(check.value) for check in checks)
    assert failed(checks) == {
        "plain: longest wait for a load over these",
        "plain: wait for a load: p99 over the median",
    }
