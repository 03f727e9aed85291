"""Verified proposals keep the tokens of decoding, and their distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given

from mlx_parallm.types.request import SamplingParams
from mlx_parallm.types.step import SampledToken, SampleSpec
from mlx_parallm.worker.generation.model_step import count_accepted, keep_valid
from mlx_parallm.worker.sampling.sampler import Sampler
from mlx_parallm.worker.sampling.truncation import draw_logits

VOCAB = 8
DRAWS = 4000


@given(chosen=st.lists(st.integers(0, 2), min_size=1, max_size=6), data=st.data())
def test_proposals_stand_as_far_as_each_was_chosen(chosen: list[int], data: st.DataObject) -> None:
    length = len(chosen) - 1
    proposals = data.draw(st.lists(st.integers(0, 2), min_size=length, max_size=length))
    count = count_accepted(chosen, proposals)
    assert proposals[:count] == chosen[:count]
    assert count == length or proposals[count] != chosen[count]


def test_each_sequence_keeps_its_own() -> None:
    rows = [(1, 5), (2, 7), (2, 8), (2, 9), (3, 4), (3, 6)]
    tokens = [SampledToken(seq_id=seq_id, token_id=token) for seq_id, token in rows]
    kept = keep_valid(tokens, [(), (7, 1), (4,)])
    assert [(token.seq_id, token.token_id) for token in kept] == [
        (1, 5),
        (2, 7),
        (2, 8),
        (3, 4),
        (3, 6),
    ]


def specs(params: SamplingParams, count: int, position: int) -> list[SampleSpec]:
    return [
        SampleSpec(params=params, seed=seed, position=position, prompt_ids=(), output_ids=())
        for seed in range(count)
    ]


PARAMS = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 4},
    {"min_p": 0.2, "logit_bias": ((3, 1.5),)},
    {"temperature": 1.4, "top_n_sigma": 1.2},
]


@pytest.mark.parametrize("fields", PARAMS)
@pytest.mark.parametrize("proposal", [0, 5])
def test_two_verified_tokens_have_the_models_joint_distribution(
    fields: dict[str, object], proposal: int
) -> None:
    """Use a toy model of two steps: the second's logits depend on the first token."""
    params = SamplingParams(**fields)  # type: ignore[arg-type]
    mx.random.seed(4)
    first = mx.random.normal((VOCAB,)) * 1.5
    second = mx.random.normal((VOCAB, VOCAB)) * 1.5
    sampler = Sampler()
    # The rows of every draw: after the last token, and after the proposal.
    before = sampler(mx.repeat(first[None], DRAWS, axis=0), specs(params, DRAWS, 7)).tokens
    after = sampler(
        mx.repeat(second[proposal][None], DRAWS, axis=0), specs(params, DRAWS, 8)
    ).tokens
    # Where the proposal was refused, the next step chooses the second token.
    chosen_first = np.array(before)
    later = np.array(sampler(second[before], specs(params, DRAWS, 8)).tokens)
    pairs: Counter[tuple[int, int]] = Counter()
    accepted = 0
    for row, token in enumerate(chosen_first.tolist()):
        follow = int(after[row]) if token == proposal else int(later[row])
        accepted += token == proposal
        pairs[token, follow] += 1
    expected = joint(first, second, params)
    # A proposal that is certain is accepted as often as the model would choose it.
    share = expected.sum(axis=1)[proposal]
    assert abs(accepted / DRAWS - share) < 4 * np.sqrt(max(share * (1 - share), 1e-9) / DRAWS)
    check_chi_square(pairs, expected)


def joint(first: mx.array, second: mx.array, params: SamplingParams) -> np.ndarray:
    """Exact probabilities of both tokens."""
    start = probabilities(first[None], params)[0]
    return start[:, None] * probabilities(second, params)


def probabilities(logits: mx.array, params: SamplingParams) -> np.ndarray:
    for token, bias in params.logit_bias:
        logits = logits + bias * (mx.arange(VOCAB) == token)
    cut = draw_logits(logits, [params] * logits.shape[0])
    return np.array(mx.softmax(cut, axis=-1)).astype(np.float64)


def check_chi_square(pairs: Counter[tuple[int, int]], expected: np.ndarray) -> None:
    """No impossible pair, and a statistic that one fair run in 10,000 exceeds."""
    assert all(expected[pair] > 0 for pair in pairs)
    common = [pair for pair in np.ndindex(*expected.shape) if DRAWS * expected[pair] >= 5]
    counts = np.array([pairs[pair] for pair in common], dtype=float)
    wanted = np.array([DRAWS * expected[pair] for pair in common])
    rest, wanted_rest = DRAWS - counts.sum(), DRAWS - wanted.sum()
    statistic = float(((counts - wanted) ** 2 / wanted).sum())
    if wanted_rest >= 5:
        statistic += (rest - wanted_rest) ** 2 / wanted_rest
    freedom = len(common) - (wanted_rest < 5)
    # Wilson and Hilferty's approximation of the 0.9999 quantile.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * np.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_greedy_rows_keep_the_likeliest_up_to_the_first_wrong_proposal(wrong: int) -> None:
    mx.random.seed(1)
    logits = mx.random.normal((4, VOCAB))
    best: Sequence[int] = mx.argmax(logits, axis=-1).tolist()  # type: ignore[assignment]
    proposals = [token if i != wrong else (token + 1) % VOCAB for i, token in enumerate(best[:3])]
    result = Sampler()(logits, specs(SamplingParams(temperature=0), 4, 0))
    kept = keep_valid(result.to_python([9] * 4), [proposals])
    assert [token.token_id for token in kept] == best[: wrong + 1]
