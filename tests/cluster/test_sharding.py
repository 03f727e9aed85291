"""Models in parts, computed by ranks together, against the same ops in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.types.step import StepOutput
from tests.cluster import sharded_models
from tests.cluster.rank_processes import run_ranks
from tests.cluster.sharded_models import write_model
from tests.cluster.sharded_ops import run_all

MODULE = "tests.cluster.sharded_ops"
#: TOLERANCE of log-probabilities: sums over ranks add in another order.
TOLERANCE = 1e-4

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, list[Results]]:
    """Return the results of one process and of two ranks."""
    folder = tmp_path_factory.mktemp("pair")
    return _both(2, folder, [f"base={write_model(folder / 'dense', sharded_models.DENSE)}"])


def _both(size: int, folder: Path, scenarios: list[str]) -> tuple[Results, list[Results]]:
    return run_all(None, scenarios), run_ranks(size, folder, [MODULE, *scenarios])


def test_two_ranks_give_the_tokens_of_one_process(pair: tuple[Results, list[Results]]) -> None:
    alone, (first, _) = pair
    assert first["base"]["path"] == alone["base"]["path"] == "packed"
    _assert_alike(first["base"]["base"], alone["base"]["base"])


def test_digests_of_parts_are_those_of_whole_weights(pair: tuple[Results, list[Results]]) -> None:
    alone, ranks = pair
    assert len(alone["base"]["digests"]) > 20
    for rank in ranks:
        assert rank["base"]["digests"] == alone["base"]["digests"]


def test_three_ranks_share_three_heads(tmp_path: Path) -> None:
    scenario = f"base={write_model(tmp_path / 'thirds', sharded_models.THIRDS)}"
    alone, (first, *others) = _both(3, tmp_path, [scenario])
    _assert_alike(first["base"]["base"], alone["base"]["base"])
    for rank in others:
        assert rank["base"]["digests"] == alone["base"]["digests"]


def _assert_alike(actual: list[StepOutput], expected: list[StepOutput]) -> None:
    """Check tokens and their likeliest alternatives."""
    for step, wanted in zip(actual, expected, strict=True):
        assert [token.token_id for token in step.tokens] == [
            token.token_id for token in wanted.tokens
        ]
        for token, other in zip(step.tokens, wanted.tokens, strict=True):
            assert token.logprob is not None
            assert other.logprob is not None
            assert dict(token.logprob.top) == pytest.approx(dict(other.logprob.top), abs=TOLERANCE)
