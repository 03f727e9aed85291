"""Golden beam searches (``scripts/golden_beams.py``), and how results differ from them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from mlx_parallm.types.beams import BeamParams
from mlx_parallm.types.request import SamplingParams

GOLDEN = Path(__file__).parent / "golden" / "beams"
ENCODER_DECODERS = ("bart", "nllb", "t5_v1_1")
DECODERS = ("gpt2", "llama", "qwen3")
# NEAR_TIE: hypotheses whose scores are nearer to each other may change places.
NEAR_TIE = 1e-3

Search = dict[str, Any]


def read_searches(name: str) -> list[Search]:
    searches: list[Search] = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    return searches


def params_of(search: Search) -> SamplingParams:
    """Return the parameters of a search; a forced first token is the end of the prompt."""
    num_forced = int("forced_bos_token_id" in search)
    return SamplingParams(
        temperature=0.0,
        n=search["width"],
        beams=BeamParams(
            width=search["width"],
            length_penalty=search["length_penalty"],
            early_stopping=search["early_stopping"],
            num_counted=num_forced,
            renormalizes=search.get("renormalize_logits", False),
        ),
        max_tokens=search["max_new_tokens"] - num_forced,
        ignore_eos=True,
        stop_token_ids=tuple(search["eos_token_id"]),
        min_tokens=search.get("min_new_tokens", 0),
        repetition_penalty=search.get("repetition_penalty", 1.0),
        no_repeat_ngram_size=search.get("no_repeat_ngram_size", 0),
        forced_eos_id=search.get("forced_eos_token_id"),
        logprobs=0,
    )


def differences(search: Search, results: Sequence[tuple[Sequence[int], float]]) -> Iterator[str]:
    """Yield how results, tokens and sums of log-probabilities, differ, but for near ties."""
    num_forced = int("forced_bos_token_id" in search)
    expected = [(tuple(ids[num_forced:]), score) for ids, score in search["hypotheses"]]
    penalty = search["length_penalty"]
    actual = [(tuple(ids), total / (len(ids) + num_forced) ** penalty) for ids, total in results]
    scores, known = [score for _, score in expected], dict(expected)
    for (ids, score), (right_ids, right_score) in zip(actual, expected, strict=True):
        if abs(score - right_score) > NEAR_TIE * max(1, abs(right_score)):
            yield f"score {score} in place of {right_score}"
        near = [other for other in scores if abs(other - right_score) < NEAR_TIE]
        if ids != right_ids and not (len(near) > 1 and ids in known):
            yield f"{ids} in place of {right_ids}"
    assert all(better >= worse - NEAR_TIE for (_, better), (_, worse) in pairwise(actual))
