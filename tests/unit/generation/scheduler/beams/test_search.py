"""The search against a reimplementation of transformers', and its rules one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.generation.scheduler.beam_search import BeamSearch, BeamToken, count_candidates
from mlx_parallm.types.beams import BeamParams, EarlyStopping
from mlx_parallm.types.step import TokenLogprob
from tests.beam_reference import NextLogprobs, reference_beams

END = 0


def table_model(seed: int, vocab: int, end_bias: float) -> NextLogprobs:
    """Return log-probabilities that are random by the tokens before them."""

    def logprobs_of(tokens: tuple[int, ...]) -> np.ndarray:
        random = np.random.RandomState(hash((seed, tokens)) & 0xFFFFFFFF)
        logits = 2 * random.standard_normal(vocab)
        logits[END] += end_bias
        return np.array(logits - np.log(np.exp(logits).sum()))

    return logprobs_of


def run_search(search: BeamSearch, logprobs_of: NextLogprobs, num_candidates: int) -> None:
    """Advance a search to its end."""
    while not search.is_done:
        texts = [tuple(token.entry.token_id for token in beam.tokens) for beam in search.beams]
        parents = search.advance([rows_of(logprobs_of(text), num_candidates) for text in texts])
        assert len(parents) == (0 if search.is_done else len(search.beams))


def rows_of(logprobs: np.ndarray, count: int) -> list[BeamToken]:
    """Return the ``count`` likeliest tokens, best first."""
    order = np.argsort(-logprobs, kind="stable")[:count]
    entries = [TokenLogprob(int(token), float(logprobs[token])) for token in order]
    return [BeamToken(entry) for entry in entries if entry.logprob > -math.inf]


def found(search: BeamSearch, count: int) -> list[tuple[tuple[int, ...], float]]:
    """Return the tokens and the scores of the results."""
    return [
        (tuple(token.entry.token_id for token in each.tokens), each.score)
        for each in search.results(count)
    ]


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 1 << 30),
    width=st.integers(1, 8),
    vocab=st.integers(20, 40),
    num_ends=st.integers(0, 3),
    max_tokens=st.integers(1, 12),
    length_penalty=st.sampled_from([-1.0, -0.5, 0.0, 0.6, 1.0, 2.0]),
    early_stopping=st.sampled_from([True, False, "never"]),
    end_bias=st.sampled_from([-2.0, 0.0, 2.0, 4.0]),
    num_counted=st.integers(0, 1),
)
def test_the_search_is_that_of_transformers(
    seed: int,
    width: int,
    vocab: int,
    num_ends: int,
    max_tokens: int,
    length_penalty: float,
    early_stopping: EarlyStopping,
    end_bias: float,
    num_counted: int,
) -> None:
    model, end_ids = table_model(seed, vocab, end_bias), frozenset(range(num_ends))
    expected = reference_beams(
        model,
        width=width,
        end_ids=end_ids,
        max_tokens=max_tokens,
        length_penalty=length_penalty,
        # With one beam transformers decodes greedily, up to the first end.
        early_stopping=early_stopping if width > 1 else True,
        num_counted=num_counted,
    )
    params = BeamParams(
        width=width,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        num_counted=num_counted,
    )
    search = BeamSearch(params, end_ids, max_tokens)
    run_search(search, model, count_candidates(params, num_ends))
    actual = found(search, width)
    assert [text for text, _ in actual] == [text for text, _ in expected]
    assert [score for _, score in actual] == pytest.approx([score for _, score in expected])


def tokens(*pairs: tuple[int, float]) -> list[BeamToken]:
    return [BeamToken(TokenLogprob(token_id, logprob)) for token_id, logprob in pairs]


def search_of(width: int = 2, max_tokens: int = 10, **params: object) -> BeamSearch:
    return BeamSearch(BeamParams(width=width, **params), frozenset({END}), max_tokens)  # type: ignore[arg-type]


def test_an_end_token_counts_only_among_the_first_of_the_width() -> None:
    search = search_of()
    search.advance([tokens((1, -0.1), (2, -0.2), (END, -0.3))])
    assert found(search, 2) == []
    search = search_of()
    search.advance([tokens((1, -0.1), (END, -0.3), (2, -0.4))])
    assert found(search, 2) == [((END,), -0.3)]
    assert [beam.total for beam in search.beams] == [-0.1, -0.4]


def test_beams_continue_with_several_tokens_of_one_parent() -> None:
    search = search_of()
    assert search.advance([tokens((1, -0.1), (2, -1.0), (3, -2.0))]) == [0, 0]
    assert search.advance([tokens((4, -0.1), (5, -0.2)), tokens((6, -0.3))]) == [0, 0]


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "is_done"),
    [
        (True, 1.0, True),
        # As it is now, the best beam scores -2.1 / 1; at full length it may score -2.1 / 10.
        (False, 1.0, True),
        ("never", 1.0, False),
        ("never", 0.0, True),
        ("never", -1.0, True),
    ],
)
def test_when_the_search_ends(
    early_stopping: EarlyStopping, length_penalty: float, is_done: bool
) -> None:
    search = BeamSearch(
        BeamParams(width=2, early_stopping=early_stopping, length_penalty=length_penalty),
        frozenset({END, 1}),
        10,
    )
    search.advance([tokens((END, -0.1), (1, -2.0), (2, -2.1), (3, -2.2))])
    assert search.is_done is is_done
    assert len(search.results(2)) == 2


def test_scores_divide_by_the_length_with_its_end_token() -> None:
    for penalty in (-1.0, 0.0, 0.5, 2.0):
        search = search_of(width=1, length_penalty=penalty)
        search.advance([tokens((1, -0.5), (END, -3.0))])
        search.advance([tokens((END, -0.25), (1, -3.0))])
        (hypothesis,) = search.results(1)
        assert hypothesis.total == -0.75
        assert hypothesis.score == pytest.approx(-0.75 / 2**penalty)
        assert hypothesis.is_stopped


def test_where_few_tokens_are_possible_there_are_few_beams_and_results() -> None:
    search = search_of(width=4, max_tokens=2)
    search.advance([tokens((3, 0.0))])
    assert len(search.beams) == 1
    search.advance([tokens((4, 0.0), (5, -1.0))])
    assert search.is_done
    assert found(search, 4) == [((3, 4), 0.0), ((3, 5), -0.5)]
    assert not search.results(4)[0].is_stopped


def test_an_end_that_the_limit_forces_is_no_stop() -> None:
    params = BeamParams(width=2)
    search = BeamSearch(params, frozenset({END}), 2, forces_end=True)
    search.advance([tokens((3, -0.5), (END, -0.7), (4, -2.0))])
    search.advance([tokens((END, 0.0)), tokens((END, 0.0))])
    assert search.is_done
    ends = {tuple(t.entry.token_id for t in each.tokens): each for each in search.results(4)}
    assert {ids: each.is_stopped for ids, each in ends.items()} == {
        (END,): True,
        (3, END): False,
    }


def test_a_search_ends_where_nothing_is_possible() -> None:
    search = search_of()
    assert search.advance([[]]) == []
    assert (search.is_done, search.results(2)) == (True, [])


def test_ties_go_to_the_better_beam() -> None:
    search = search_of(width=2)
    search.advance([tokens((1, -1.0), (2, -2.0))])
    rows = [tokens((3, -2.0)), tokens((4, -1.0), (5, -1.0))]
    search.advance(rows)
    assert [[t.entry.token_id for t in beam.tokens] for beam in search.beams] == [[1, 3], [2, 4]]
