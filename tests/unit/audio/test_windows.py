"""Windows and segments of long recordings are those of transformers: tests/golden/speech.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlx_parallm.audio.windows import (
    Thresholds,
    Verdict,
    compression_ratio,
    judged,
    segments_of,
)

GOLDEN = json.loads(
    (Path(__file__).parents[2] / "golden" / "speech.json").read_text(encoding="utf-8")
)


def test_segments_and_the_next_window_are_those_of_transformers() -> None:
    for case in GOLDEN["segments"]:
        segments, offset = segments_of(
            case["tokens"], case["first"], case["frames"], GOLDEN["ids"]["begin"]
        )
        assert offset == case["offset"], case
        assert [list(each.token_ids) for each in segments] == [row[2] for row in case["segments"]]
        for own, (start, end, _) in zip(segments, case["segments"], strict=True):
            assert (own.start, own.end) == pytest.approx((start, end), abs=1e-6), case


def test_tokens_are_compressed_as_by_transformers() -> None:
    for case in GOLDEN["ratios"]:
        own = compression_ratio(case["tokens"], case["size"])
        assert own == pytest.approx(case["ratio"], rel=1e-9)


@pytest.mark.parametrize(
    ("ratio", "logprob", "no_speech", "verdict"),
    [
        (1.0, -0.5, 0.9, Verdict()),
        (2.0, -0.5, 0.9, Verdict(is_doubted=True)),
        (1.0, -1.5, 0.1, Verdict(is_doubted=True)),
        (1.0, -1.5, 0.9, Verdict(is_silent=True)),
        (2.0, -1.5, 0.9, Verdict(is_silent=True)),
    ],
)
def test_texts_that_repeat_or_are_guessed_are_doubted(
    ratio: float, logprob: float, no_speech: float, verdict: Verdict
) -> None:
    signs = {"ratio": ratio, "mean_logprob": logprob, "no_speech": no_speech}
    assert judged(Thresholds(), **signs) == verdict
    without = Thresholds(compression_ratio=None, logprob=None, no_speech=None)
    assert judged(without, **signs) == Verdict()
