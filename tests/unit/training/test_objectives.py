"""Losses and scores of predicted labels."""

from __future__ import annotations

import numpy as np
import pytest

from mlx_parallm.training.objectives import Measure, losses, scores

RESULTS = [np.array(row, np.float32) for row in ([[2.0, 0.0]], [[0.0, 1.0]], [[3.0, 1.0]])]
LABELS = [0, 1, 1]


def test_the_cross_entropy_is_that_of_the_right_label() -> None:
    expected = [np.log(1 + np.exp(gap)) for gap in (-2.0, -1.0, 2.0)]
    assert losses(RESULTS, LABELS, Measure.CROSS_ENTROPY) == pytest.approx(expected)


def test_an_error_is_a_wrong_label() -> None:
    assert losses(RESULTS, LABELS, Measure.ERROR).tolist() == [0.0, 0.0, 1.0]


def test_large_logits_do_not_overflow() -> None:
    result = np.array([1e30, -1e30], np.float32)
    assert losses([result], [0], Measure.CROSS_ENTROPY).tolist() == [0.0]


def test_scores_of_labels() -> None:
    result = scores(RESULTS, LABELS)
    assert result.accuracy == pytest.approx(2 / 3)
    # Label 0: precision 1/2, recall 1; label 1: precision 1, recall 1/2.
    assert result.f1 == pytest.approx(2 / 3)
    assert result.loss == pytest.approx(losses(RESULTS, LABELS, Measure.CROSS_ENTROPY).mean())


def test_labels_that_do_not_occur_are_left_out_of_f1() -> None:
    wide = [np.array([5.0, 0.0, 0.0], np.float32)] * 2
    assert scores(wide, [0, 0]).f1 == 1.0
