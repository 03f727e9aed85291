"""Tokens that a rule of timestamps allows are those of transformers: tests/golden/speech.json."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.types.request import SamplingParams, TimestampRule
from mlx_parallm.types.step import SampleSpec
from mlx_parallm.worker.sampling.sampler import Sampler
from mlx_parallm.worker.sampling.timestamps import with_timestamps

GOLDEN = json.loads(
    (Path(__file__).parents[3] / "golden" / "speech.json").read_text(encoding="utf-8")
)
IDS, CASES = GOLDEN["ids"], GOLDEN["timestamps"]
RULE = TimestampRule(
    begin_id=IDS["begin"], end_id=IDS["end"], off_id=IDS["off"], max_initial=IDS["max_initial"]
)


def logits_of(case: dict[str, Any]) -> np.ndarray:
    logits = np.random.RandomState(case["seed"]).standard_normal(IDS["size"]).astype(np.float32)
    logits[IDS["begin"] :] += np.float32(case["shift"])
    return logits


def spec_of(case: dict[str, Any], *, is_pending: bool, **params: Any) -> SampleSpec:
    tokens = case["tokens"]
    is_pending = is_pending and bool(tokens)
    return SampleSpec(
        params=replace(SamplingParams(timestamps=RULE), **params),
        seed=case["seed"],
        position=len(tokens) + 1,
        prompt_ids=[1],
        output_ids=tokens[:-1] if is_pending else tokens,
        has_pending=is_pending,
    )


def allowed_of(case: dict[str, Any]) -> list[int]:
    return [token for first, last in case["allowed"] for token in range(first, last + 1)]


@pytest.mark.parametrize("is_pending", [False, True])
def test_a_batch_allows_the_tokens_of_transformers(is_pending: bool) -> None:
    logits = mx.array(np.stack([logits_of(case) for case in CASES]))
    specs = [spec_of(case, is_pending=is_pending) for case in CASES]
    latest = mx.array([(case["tokens"] or [0])[-1] for case in CASES])
    ruled = np.array(with_timestamps(logits, specs, latest if is_pending else None))
    for row, case in zip(ruled, CASES, strict=True):
        allowed = np.flatnonzero(np.isfinite(row)).tolist()
        assert allowed == allowed_of(case), case
        assert (row[allowed] == logits_of(case)[allowed]).all()


def test_rows_without_a_rule_stay_and_greedy_rows_choose_by_it() -> None:
    logits = mx.array(np.stack([logits_of(case) for case in CASES for _ in range(2)]))
    specs = [
        spec_of(case, is_pending=False, temperature=0.0, timestamps=rule)
        for case in CASES
        for rule in (RULE, None)
    ]
    tokens: Any = Sampler()(logits, specs).tokens.tolist()
    for place, case in enumerate(CASES):
        own, allowed = logits_of(case), allowed_of(case)
        assert tokens[2 * place] == allowed[int(own[allowed].argmax())]
        assert tokens[2 * place + 1] == int(own.argmax())
